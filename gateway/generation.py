"""One request on its way through a replica: sent, tried again where that is safe, watched, and accounted for."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Set
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import msgspec
import structlog

from engine.wire import EngineInfo, Output, Sampling
from gateway.accounting import Account, Accounting
from gateway.config import ClassConfig, TenantConfig
from gateway.errors import (
    GenerationError,
    HeadstartError,
    OverloadedError,
    ReplicaLost,
    ReplicaUnavailable,
    RequestTimeoutError,
)
from gateway.plan import Plan
from gateway.replicas.base import CountedOutput, GenerationRequest, Replica, ReplicaState
from gateway.routing.flight import Flight
from gateway.routing.router import Router
from gateway.tracing import describe, stage

__all__ = ["Answer", "Dispatcher", "Generation", "Planner", "SamplingChoice", "Terms"]

Planner = Callable[[Set[str]], Plan | Awaitable[Plan]]
"""Walks the request path, to a replica not among those given. Called again when one failed before its first output."""

SamplingChoice = Callable[[Plan, EngineInfo], Sampling]
"""Fits the caller's wishes to the replica that was chosen."""


class Terms(msgspec.Struct, frozen=True):
    """What is asked of a replica whatever the prompt is: how many choices, and the rules for its caller.

    ``prompt_only`` throws away what is generated: a replica generates one token at least. ``whole``: nobody reads the
    answer before its end.
    """

    n: int = 1
    service_class: ClassConfig = ClassConfig()
    tenant: TenantConfig = TenantConfig()
    prompt_only: bool = False
    whole: bool = False


_ALONE: Final = Terms()
_NONE: Final[frozenset[str]] = frozenset()

_RECOVERY_WAIT_S: Final = 30.0
"""How long a request whose replica died before its first token waits for one to come (back) up."""

_POLL_S: Final = 0.05

_NO_CODE: Final = "invalid_request"

_ATTEMPTS: Final = 3
"""On so many replicas a request is tried at most: one that kills every engine it meets does not go round for ever."""

_ATTEMPTS_HERE: Final = 2
"""On an engine that this gateway starts again, when there is no other; on any other replica once."""

_log = structlog.get_logger("headstart.request")


class Answer:
    """What one choice has said, as it comes. Owned by its generation. ``token_ids`` where the replica tells them."""

    __slots__ = ("_texts", "token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []

    def add(self, output: Output) -> None:
        """Take in the next output."""
        self._texts.append(output.text)
        self.token_ids += output.token_ids

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self._texts)


class Generation:
    """A running request whose first output is there. Owned by the task that handles it.

    Iterate to get the outputs of its ``n`` choices as they come; the counts are complete afterwards. ``cached_tokens``
    is known from the start where the replica's engine is ours, at the end elsewhere, and None until then and where the
    replica does not tell. ``prompt_logprobs`` are there from the start, if they were asked for. ``finish_reasons`` has
    those of the choices that have ended, by index. ``ttft_s`` is None where the answer was asked for as one.
    """

    def __init__(
        self,
        plan: Plan,
        terms: Terms,
        sampling: Sampling,
        first: Output,
        outputs: AsyncGenerator[Output, None],
        ttft_s: float | None,
    ) -> None:
        self.plan: Final = plan
        self.sampling: Final = sampling
        self.n: Final = terms.n
        self.answer: Final = Answer() if plan.comparison is not None else None
        self.prompt_logprobs: Final = first.prompt_logprobs
        self.cached_tokens = first.cached_tokens
        self.completion_tokens = 0
        self.finish_reasons: dict[int, str] = {}
        self.ended = False
        """Whether every choice has come to its end."""
        self.prefill_s = first.prefill_s or 0.0
        self.ttft_s: Final = ttft_s
        self._prompt_only: Final = terms.prompt_only
        self._first: Output | None = first
        self._outputs: Final = outputs

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.plan.length

    def attributes(self) -> dict[str, str | int | float]:
        """What a trace says of it."""
        told: dict[str, str | int | float] = {
            "headstart.replica": self.plan.replica_id,
            "headstart.tenant": self.plan.tenant,
            "headstart.template": self.plan.template,
            "headstart.prompt_tokens": self.prompt_tokens,
            "headstart.cached_tokens": self.cached_tokens or 0,
            "headstart.completion_tokens": self.completion_tokens,
        }
        if self.ttft_s is not None:
            told["headstart.ttft_s"] = self.ttft_s
        return told

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Output:
        """The next output; the last one of each choice has its finish reason.

        Raises: as ``Replica.generate``.
        """
        if self.ended:
            raise StopAsyncIteration
        if self._first is not None:
            output, self._first = self._first, None
        else:
            output = await anext(self._outputs)
        if self._prompt_only:
            ended = output.finish_reason and "length"  # whatever the token is that nobody asked for
            output = Output(output.id, finish_reason=ended, cached_tokens=output.cached_tokens, index=output.index)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if isinstance(output, CountedOutput):
            self.completion_tokens = output.completion_tokens
        else:
            self.completion_tokens += len(output.token_ids)
        if self.answer is not None:
            self.answer.add(output)
        if output.finish_reason is not None:
            self.finish_reasons[output.index] = output.finish_reason
            self.ended = len(self.finish_reasons) == self.n
        return output


class _Attempt:
    """A request at one replica, in flight there until it is closed. Owned by the task that handles it."""

    __slots__ = ("flight", "outputs")

    def __init__(self, flight: Flight, outputs: AsyncGenerator[Output, None]) -> None:
        self.flight: Final = flight
        self.outputs: Final = outputs

    async def close(self, error: BaseException | None = None) -> None:
        """End it, with the ``error`` that it ended with."""
        try:
            await self.outputs.aclose()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.flight.__exit__(None if error is None else type(error), error, None)


class Dispatcher:
    """Sends planned requests to replicas and records what became of them.

    Owns the count of requests in hand; belongs to the event loop.
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        router: Router,
        accounting: Accounting,
        *,
        max_queue: int,
        timeout_s: float,
        on_served: Callable[[Generation], None] | None = None,
        on_load: Callable[[], None] | None = None,
    ) -> None:
        """``on_served`` hears of every request that was answered, at least in part, when it has ended.

        ``on_load`` is called whenever ``active`` has grown.
        """
        self._replicas: Final = replicas
        self._router: Final = router
        self._accounting: Final = accounting
        self._timeout_s: Final = timeout_s
        self._on_served: Final = on_served
        self._on_load: Final = on_load
        self.max_queue: Final = max_queue
        self.active = 0
        """Requests that wait or run, at most ``max_queue``."""
        self.refused: Counter[str] = Counter()
        """Requests that were sent to no replica, by the code of the error that their callers got."""

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as in hand for the length of the block.

        Raises:
            OverloadedError: Too many requests are waiting or running.
        """
        self._admit()
        try:
            yield
        finally:
            self.active -= 1

    def _admit(self) -> None:
        if self.active >= self.max_queue:
            full = OverloadedError(f"{self.active} requests are waiting or running, which is the limit; try again.")
            self.refuse(full)
            raise full
        self.active += 1
        if self._on_load is not None:
            self._on_load()

    def refuse(self, error: HeadstartError) -> None:
        """Count a request that was sent to no replica, because of ``error``."""
        self.refused[error.code or _NO_CODE] += 1

    @asynccontextmanager
    async def generate(
        self, planner: Planner, sampling: SamplingChoice, *, terms: Terms = _ALONE, arrived: float
    ) -> AsyncIterator[Generation]:
        """Run one request for the length of the block; leaving it early aborts the request at its replica.

        ``arrived`` is when the caller began to send it (``time.monotonic``).

        Raises:
            OverloadedError: Too many requests are waiting or running.
            HeadstartError: What the planner raises, or why no replica could answer.
        """
        self._admit()
        account = self._accounting.open(arrived)
        try:
            async with asyncio.timeout(self._timeout_s):
                attempt, generation = await self._open(planner, sampling, terms, account)
                account.generation = generation
                try:
                    with stage("decode"):
                        yield generation
                except BaseException as error:
                    await attempt.close(error)
                    raise
                await attempt.close()
            account.close("ok")
        except TimeoutError:
            if account.generation is None and account.flight is not None:
                account.flight.expired()
            account.close("failed")
            raise RequestTimeoutError(f"The request was ended after {self._timeout_s:.0f} s.") from None
        except HeadstartError as error:
            # What the caller got wrong was never a request to a replica, and is no failure of one.
            if error.status >= 500:
                account.close("failed")
            if not account.is_planned:
                self.refuse(error)
            raise
        except asyncio.CancelledError:
            account.close("aborted")
            raise
        except BaseException:
            account.close("failed")
            raise
        finally:
            self.active -= 1
            account.tell()
            if account.generation is not None:
                describe(account.generation.attributes)
                if self._on_served is not None:
                    self._on_served(account.generation)

    async def _open(
        self, planner: Planner, sampling: SamplingChoice, terms: Terms, account: Account
    ) -> tuple[_Attempt, Generation]:
        """Wait for the first output; when a replica fails before it, try another one."""
        tried: Counter[str] = Counter()
        while True:
            try:
                return await self._attempt(
                    planner, sampling, terms, account, await self._avoid(tried) if tried else _NONE
                )
            except (ReplicaLost, GenerationError) as error:
                if all(replica.state is ReplicaState.STOPPED for replica in self._replicas.values()):
                    message = "The server has shut down; try another one, or this one again later."
                    raise OverloadedError(message) from error
                tried[account.replica_id] += 1
                if tried.total() == _ATTEMPTS or not self._open_to(tried):
                    raise
                _log.warning("request is tried again", replica=account.replica_id, reason=error.message)

    def _open_to(self, tried: Counter[str]) -> list[Replica]:
        """The replicas on which a request may be tried (again), now or when they have come up."""
        return [
            replica
            for id, replica in self._replicas.items()
            if tried[id] < (_ATTEMPTS_HERE if replica.restarts else 1)
            and (replica.restarts or replica.state is ReplicaState.READY)
            and replica.state is not ReplicaState.STOPPED
        ]

    async def _attempt(
        self,
        planner: Planner,
        sampling: SamplingChoice,
        terms: Terms,
        account: Account,
        avoid: Set[str],
    ) -> tuple[_Attempt, Generation]:
        with stage("plan"):
            planned = planner(avoid)
            plan = planned if isinstance(planned, Plan) else await planned
        replica = self._replicas.get(plan.replica_id)
        if replica is None or replica.info is None:  # while a long prompt was planned
            raise ReplicaUnavailable("The replica that was chosen has gone; try again.")
        plan = account.planned(plan, replica.info)
        chosen = sampling(plan, replica.info)
        flight = account.flight = self._router.dispatch(plan)
        flight.__enter__()
        request = GenerationRequest(
            plan.token_ids,
            plan.root,
            chosen,
            plan.use_cache,
            terms.n,
            terms.service_class.priority,
            terms.service_class.max_running,
            plan.tenant,
            terms.tenant.max_cached_blocks,
            terms.whole and plan.arm is None and flight.leave_untimed(),
        )
        attempt = _Attempt(flight, replica.generate(request))
        try:
            with stage("answer" if flight.untimed else "prefill"):
                first = await anext(attempt.outputs)
            flight.prefilled()
        except BaseException as error:
            await attempt.close(error)
            raise
        ttft_s = None if flight.untimed else time.monotonic() - account.arrived
        return attempt, Generation(plan, terms, chosen, first, attempt.outputs, ttft_s)

    async def _avoid(self, tried: Counter[str]) -> Set[str]:
        """The replicas to leave out: those that failed the request, unless one of them is all there is.

        Waits for an engine that is started again when no other replica is there.
        """
        deadline = time.monotonic() + _RECOVERY_WAIT_S
        while open_to := self._open_to(tried):
            ready = [replica for replica in open_to if replica.state is ReplicaState.READY]
            if fresh := [replica.id for replica in ready if not tried[replica.id]] or [replica.id for replica in ready]:
                return self._replicas.keys() - fresh
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        raise ReplicaUnavailable("The engine was lost and has not come back yet; try again.")
