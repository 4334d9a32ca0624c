"""Requests that are passed on as they came: placed by their text, relayed byte for byte, accounted for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import structlog

from gateway.canonical.templates import UNREGISTERED
from gateway.errors import HeadstartError, InvalidRequestError, ReplicaLost, RequestTimeoutError
from gateway.foreign import ForeignRequest, Owned
from gateway.generation import Dispatcher
from gateway.plan import Caller, Plan
from gateway.replicas.base import Replica, ReplicaState
from gateway.replicas.openai_http import ForwardedAnswer, OpenAIReplica
from gateway.request_path import RequestPath
from gateway.routing.affinity import owner
from gateway.routing.candidate import Candidate
from gateway.routing.flight import Flight
from gateway.routing.router import Router
from gateway.stats.record import RequestRecord
from gateway.stats.statistics import Statistics

__all__ = ["Forwarder", "Forwarding"]

_ATTEMPTS: Final = 3
_TAIL_BYTES: Final = 64 * 1024

_log = structlog.get_logger("headstart.request")


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Counted(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


_counted_decoder: Final = msgspec.json.Decoder(_Counted)


class Forwarding:
    """A request at a remote server whose answer has begun. Owned by the task that handles it.

    ``chunks`` gives the body as it comes. Raises: as ``Replica.generate``.
    """

    def __init__(self, plan: Plan, answer: ForwardedAnswer, flight: Flight) -> None:
        self.plan: Final = plan
        self.status: Final = answer.status
        self.headers: Final = answer.headers
        self.streamed: Final = answer.streamed
        self.first_at: float | None = None
        self._answer: Final = answer
        self._flight: Final = flight
        self._tail = b""

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece."""
        async for data in self._answer.chunks:
            if self.first_at is None:
                self.first_at = time.monotonic()
                self._flight.prefilled()
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            yield data

    @property
    def usage(self) -> _Usage:
        """What the server counted, as far as its answer told."""
        if not self.streamed:
            return _usage_in(self._tail)
        events = [event for event in self._tail.split(b"\n") if b'"usage"' in event]
        return _usage_in(events[-1].strip().removeprefix(b"data:")) if events else _Usage()


def _usage_in(data: bytes) -> _Usage:
    try:
        return _counted_decoder.decode(data).usage or _Usage()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Usage()


class Forwarder:
    """Passes requests on to remote replicas. Holds no state of its own; belongs to the event loop."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        path: RequestPath,
        router: Router,
        dispatcher: Dispatcher,
        statistics: Statistics,
        *,
        timeout_s: float,
        attributed: bool,
    ) -> None:
        """``attributed``: misses have causes. Of prompts that nobody here reads it is that they were never seen."""
        self._replicas: Final = replicas
        self._path: Final = path
        self._router: Final = router
        self._dispatcher: Final = dispatcher
        self._statistics: Final = statistics
        self._timeout_s: Final = timeout_s
        self._attributed: Final = attributed

    @property
    def available(self) -> bool:
        """Whether there are remote replicas at all."""
        return any(isinstance(replica, OpenAIReplica) for replica in self._replicas.values())

    @property
    def only_text(self) -> bool:
        """Whether nobody serves but remote servers whose tokenizer could not be checked: they get every request."""
        ready = [replica for replica in self._replicas.values() if replica.state is ReplicaState.READY]
        return bool(ready) and not any(replica.reads_tokens for replica in ready)

    @asynccontextmanager
    async def forward(
        self, request: ForeignRequest, owned: Owned, headers: dict[str, str], caller: Caller, arrived: float
    ) -> AsyncIterator[Forwarding]:
        """Pass a request on for the length of the block; leaving it early aborts it at the server.

        A server that fails before its answer has begun is followed by another one.

        Raises:
            OverloadedError: Too many requests are waiting or running.
            HeadstartError: Why no replica could answer.
        """
        tried: set[str] = set()
        account: _Account | None = None
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        with self._dispatcher.admitted():
            while True:
                try:
                    plan, replica, body = self._place(request, owned, caller, tried)
                except HeadstartError as error:
                    if account is None:
                        self._dispatcher.refuse(error)
                    else:
                        account.close("failed")
                    raise
                account = _Account(self._statistics, plan, arrived, attributed=self._attributed)
                flight: Flight | None = None
                try:
                    async with asyncio.timeout_at(deadline):
                        with self._router.dispatch(plan) as flight:
                            async with replica.forward(
                                request.route, body, headers, whole=not request.streamed
                            ) as answer:
                                account.forwarding = Forwarding(plan, answer, flight)
                                yield account.forwarding
                    account.close("ok")
                    return
                except ReplicaLost as error:
                    tried.add(replica.id)
                    if account.forwarding is None and len(tried) < _ATTEMPTS and self._others(tried):
                        _log.warning("request is tried again", replica=replica.id, reason=error.message)
                        continue
                    account.close("failed")
                    raise
                except TimeoutError:
                    if flight is not None and (account.forwarding is None or account.forwarding.first_at is None):
                        flight.expired()
                    account.close("failed")
                    raise RequestTimeoutError(f"The request was ended after {self._timeout_s:.0f} s.") from None
                except BaseException as error:
                    account.close("aborted" if isinstance(error, asyncio.CancelledError) else "failed")
                    raise

    def _place(
        self, request: ForeignRequest, owned: Owned, caller: Caller, tried: set[str]
    ) -> tuple[Plan, OpenAIReplica, bytes]:
        self._path.check_model(owned.model)
        if owned.headstart is not None and owned.headstart.template is not None:
            raise InvalidRequestError(
                "headstart.template cannot be written into a request that is passed on as it is "
                f"({', '.join(request.reasons)[:200]}); send its text.",
                param="headstart.template",
            )
        local = {id for id, replica in self._replicas.items() if not isinstance(replica, OpenAIReplica)}
        candidate = _chosen(request.affinity, self._router.candidates(local | tried, as_text=True))
        replica = self._replicas[candidate.replica_id]
        assert isinstance(replica, OpenAIReplica), "others were left out"
        use_cache = owned.headstart is None or not owned.headstart.bypass
        root = self._path.root(caller.tenant, candidate.info.fingerprint, owned.cache_salt)
        plan = Plan(
            tokens=b"",
            root=root,
            keys=[],
            replica_id=replica.id,
            predicted_cached=0,
            template=UNREGISTERED,
            tenant=caller.tenant,
            order="none",
            note=f"passed on as it is: {', '.join(request.reasons)[:200]}",
            use_cache=False,
        )
        return plan, replica, request.body(candidate.info.model, root, use_cache=use_cache)

    def _others(self, tried: set[str]) -> bool:
        return any(id not in tried and isinstance(replica, OpenAIReplica) for id, replica in self._replicas.items())


def _chosen(affinity: bytes, candidates: list[Candidate]) -> Candidate:
    """Where a text belongs, among those with room: the index knows nothing of it."""
    probe = next((candidate for candidate in candidates if candidate.probe), None)
    if probe is not None:
        return probe
    home = owner(affinity, [candidate.replica_id for candidate in candidates])
    return next(candidate for candidate in candidates if candidate.replica_id == home)


class _Account:
    """Turns one request into one record, once."""

    def __init__(self, statistics: Statistics, plan: Plan, arrived: float, *, attributed: bool) -> None:
        self._statistics = statistics
        self._attributed = attributed
        self._plan = plan
        self._arrived = arrived
        self.forwarding: Forwarding | None = None

    def close(self, status: str) -> None:
        """Record the request. A refusal of the server's is no request that it answered."""
        forwarding = self.forwarding
        if forwarding is not None and forwarding.status >= 400:
            return
        usage = _Usage() if forwarding is None else forwarding.usage
        details = usage.prompt_tokens_details
        first_at = forwarding.first_at if forwarding is not None and forwarding.streamed else None
        cached = min((details.cached_tokens if details is not None else None) or 0, usage.prompt_tokens)
        missed = usage.prompt_tokens - cached
        self._statistics.record(
            RequestRecord(
                finished_at=time.time(),
                tenant=self._plan.tenant,
                template=self._plan.template,
                replica=self._plan.replica_id,
                status=status,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=cached,
                completion_tokens=usage.completion_tokens,
                ttft_s=None if first_at is None else first_at - self._arrived,
                prefill_s=0.0,
                saved_prefill_s=0.0,
                missed={"never_seen": missed} if self._attributed and missed else {},
            )
        )
