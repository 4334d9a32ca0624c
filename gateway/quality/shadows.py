"""Asking again while nobody else wants anything: what comparing answers costs no user.

A sampled request is kept as token ids and the text of its answer, for a while and in bounded memory. When the gateway
has been idle for a moment, it is answered in the application's order by a replica, outside of all statistics and of the
prefix cache; a request that arrives meanwhile ends that at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
import structlog

from cache_policy.keys import TOKEN_BYTES
from engine.admission import MAX_PROMPT_LOGPROBS
from engine.wire import EngineInfo, Output, Sampling
from gateway.errors import HeadstartError, InvalidRequestError
from gateway.generation import Generation
from gateway.quality.answers import contains_any, distance
from gateway.quality.ledger import Pair
from gateway.replicas.base import BACKGROUND_PRIORITY, GenerationRequest, Replica, ReplicaState

__all__ = ["MAX_AGE_S", "MAX_BYTES", "MAX_KEPT", "ShadowStatus", "Shadows"]

MAX_KEPT: Final = 64
MAX_BYTES: Final = 8 * 1024 * 1024
MAX_AGE_S: Final = 900.0
"""So many requests, bytes and seconds are kept at most; what is oldest is dropped."""

_MOST_TRIES: Final = 3
"""A request that arrivals have ended so often is dropped."""

_SETTLE_S: Final = 0.1
_PAUSE_S: Final = 0.05
_TIMEOUT_S: Final = 300.0

_log = structlog.get_logger("headstart.quality")


class ShadowStatus(msgspec.Struct, frozen=True):
    """What became of the sampled requests; ``kept`` and ``kept_bytes`` are waiting now.

    ``dropped`` were too old, too many or too large, or interrupted too often; ``failed`` were not answered again.
    """

    kept: int
    kept_bytes: int
    compared: int
    dropped: int
    interrupted: int
    failed: int


class _Kept(msgspec.Struct):
    """A reordered request and its answer: what it takes to compare it. ``prompt`` is the one that was answered."""

    template: str
    tenant: str
    replica_id: str
    fingerprint: str
    root: bytes
    prompt: array[int]
    application: array[int]
    answer: str
    answer_ids: array[int]
    gold: tuple[str, ...]
    sampling: Sampling
    kept_at: float
    tries: int = 0

    @property
    def bytes(self) -> int:
        tokens = len(self.prompt) + len(self.application) + len(self.answer_ids)
        return TOKEN_BYTES * tokens + 4 * (len(self.answer) + sum(map(len, self.gold)))


class Shadows:
    """Owns the sampled requests and the task that asks them again. Belongs to the event loop.

    ``active`` tells how many requests are in hand; with more than ``busy`` nothing is asked. ``judge`` hears of each
    comparison. Texts stay in memory, and only until they are compared.
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        *,
        active: Callable[[], int],
        busy: int,
        judge: Callable[[str, Pair], None],
        settle_s: float = _SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas: Final = replicas
        self._active: Final = active
        self._busy: Final = busy
        self._judge: Final = judge
        self._settle_s: Final = settle_s
        self._clock: Final = clock
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._without_logprobs: set[str] = set()
        self._busy_at = -math.inf
        self._compared = self._dropped = self._interrupted = self._failed = 0
        self._offered = asyncio.Event()
        self._current: asyncio.Task[Pair] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to compare."""
        self._task = asyncio.create_task(self._run(), name="quality-shadows")

    def close(self) -> None:
        """Ask nothing any more, now. Safe to repeat."""
        if self._task is not None:
            self._task.cancel()
        self._forget()

    async def stop(self) -> None:
        """Close, and wait for the end of what was asked."""
        self.close()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None

    @property
    def status(self) -> ShadowStatus:
        """Counts since the start."""
        return ShadowStatus(
            len(self._kept), self._kept_bytes, self._compared, self._dropped, self._interrupted, self._failed
        )

    @property
    def comparing(self) -> bool:
        """Whether something is being asked again now."""
        return self._current is not None

    def arrived(self) -> None:
        """A user's request is there: whatever is being asked makes room for it."""
        if self._active() > self._busy:
            self._busy_at = self._clock()
            if self._current is not None:
                self._current.cancel()

    def offer(self, generation: Generation) -> None:
        """Keep an answered request if its plan asks for a comparison and the answer came to its end."""
        plan, answer = generation.plan, generation.answer
        if plan.comparison is None or answer is None or self._task is None or not generation.ended:
            return
        replica = self._replicas.get(plan.replica_id)
        info = None if replica is None else replica.info
        if info is None or not {"stop", "length"}.issuperset(generation.finish_reasons.values()):
            return
        try:
            application = plan.comparison.application_prompt()
        except HeadstartError as error:  # it was rendered in another order, but this must never hurt the answered one
            _log.info("a prompt cannot be made in the application's order", reason=error.message)
            self._failed += 1
            return
        kept = _Kept(
            template=plan.template,
            tenant=plan.tenant,
            replica_id=plan.replica_id,
            fingerprint=info.fingerprint,
            root=plan.root,
            prompt=array("I", plan.token_ids),
            application=array("I", application),
            answer=answer.text,
            answer_ids=array("I", answer.token_ids),
            gold=plan.comparison.gold,
            sampling=generation.sampling,
            kept_at=self._clock(),
        )
        self._kept.append(kept)
        self._kept_bytes += kept.bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_BYTES:
            self._drop_oldest()
        self._offered.set()

    # --- one after the other ---------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                replica, kept = await self._next()
                await self._try(replica, kept)
        finally:
            if self._current is not None:
                self._current.cancel()
                await asyncio.wait([self._current])

    async def _next(self) -> tuple[Replica, _Kept]:
        """The oldest request that is kept, when no user has wanted anything for a moment, and who may answer it."""
        while True:
            while self._kept and self._clock() - self._kept[0].kept_at > MAX_AGE_S:
                self._drop_oldest()
            if not self._kept:
                self._offered.clear()
                await self._offered.wait()
                continue
            rest_s = self._busy_at + self._settle_s - self._clock()
            if rest_s > 0 or not self._is_idle():
                await asyncio.sleep(rest_s if rest_s > 0 else _PAUSE_S)
                continue
            replica = self._replica_for(self._kept[0])
            if replica is None:
                self._drop_oldest()
                continue
            kept = self._kept.popleft()
            self._kept_bytes -= kept.bytes
            return replica, kept

    async def _try(self, replica: Replica, kept: _Kept) -> None:
        self._current = asyncio.create_task(self._compare(replica, kept), name="quality-comparison")
        await asyncio.wait([self._current])
        task, self._current = self._current, None
        if task.cancelled():
            self._interrupted += 1
            kept.tries += 1
            if kept.tries < _MOST_TRIES:
                self._kept.appendleft(kept)
                self._kept_bytes += kept.bytes
            else:
                self._dropped += 1
        elif (error := task.exception()) is not None:
            # The message of an error of ours carries no prompt text; anything else is named by its type alone.
            self._failed += 1
            reason = error.message if isinstance(error, HeadstartError) else type(error).__name__
            _log.info("an answer could not be compared", replica=replica.id, reason=reason)
        else:
            self._compared += 1
            self._judge(kept.template, task.result())

    def _is_idle(self) -> bool:
        """Whether neither this gateway nor, as far as its replicas tell, another one has more than ``busy`` to do."""
        ready = self._ready()
        if not ready or self._active() > self._busy:
            return False
        loads = [replica.load for replica in ready if replica.load is not None]
        return all(load.waiting == 0 and load.running <= self._busy for load in loads)

    def _ready(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.state is ReplicaState.READY]

    def _replica_for(self, kept: _Kept) -> Replica | None:
        """A replica with the weights that gave the answer, the same one if it may be; None when there is none."""
        alike = [replica for replica in self._ready() if _info(replica).fingerprint == kept.fingerprint]
        return next((replica for replica in alike if replica.id == kept.replica_id), alike[0] if alike else None)

    def _drop_oldest(self) -> None:
        self._kept_bytes -= self._kept.popleft().bytes
        self._dropped += 1

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    # --- one comparison --------------------------------------------------------------------------------

    async def _compare(self, replica: Replica, kept: _Kept) -> Pair:
        async with asyncio.timeout(_TIMEOUT_S):
            once, again = await self._answers(replica, kept)
            logprob = await self._lost_logprob(replica, kept)
        gold = None
        if kept.gold:
            found = [contains_any(text, kept.gold) for text in (once, again, kept.answer)]
            gold = (found[0] + found[1]) / 2 - found[2]
        return Pair(distance(kept.answer, once) - distance(again, once), logprob, gold)

    async def _answers(self, replica: Replica, kept: _Kept) -> tuple[str, str]:
        """Two answers in the application's order, which differ by what answers differ anyway.

        Greedy ones of an engine that computes in float32 do not, and one is enough. Drawn ones have seeds of their
        own: with the caller's, two would be equal, and nobody's chance alike.
        """
        room = max(0, _info(replica).max_model_len - len(kept.application))
        sampling = msgspec.structs.replace(
            kept.sampling,
            max_tokens=min(kept.sampling.max_tokens, room),
            min_tokens=min(kept.sampling.min_tokens, room),
            seed=None,
            logprobs=None,
            prompt_logprobs=None,
        )
        if sampling.temperature > 0:
            once, again = await _ask(replica, kept, kept.application, sampling, 2)
            return once, again
        (once,) = await _ask(replica, kept, kept.application, sampling, 1)
        if _repeats_itself(_info(replica)):
            return once, once
        (again,) = await _ask(replica, kept, kept.application, sampling, 1)
        return once, again

    async def _lost_logprob(self, replica: Replica, kept: _Kept) -> float | None:
        """Nats per token that the answer is less likely in the application's order; None where that is not told."""
        if replica.id in self._without_logprobs or not kept.answer_ids:
            return None
        longest = max(len(kept.prompt), len(kept.application)) + len(kept.answer_ids)
        if longest >= min(_info(replica).max_model_len, MAX_PROMPT_LOGPROBS):
            return None
        try:
            own = await _mean_logprob(replica, kept, kept.prompt)
            other = await _mean_logprob(replica, kept, kept.application)
        except InvalidRequestError:
            self._without_logprobs.add(replica.id)
            return None
        lost = own - other
        return None if math.isnan(lost) else lost


async def _ask(replica: Replica, kept: _Kept, prompt: Sequence[int], sampling: Sampling, n: int) -> list[str]:
    texts: list[list[str]] = [[] for _ in range(n)]
    async with aclosing(replica.generate(_request(kept, prompt, sampling, n))) as outputs:
        async for output in outputs:
            texts[output.index].append(output.text)
    return ["".join(parts) for parts in texts]


async def _mean_logprob(replica: Replica, kept: _Kept, prompt: array[int]) -> float:
    """Per token of the answer, given ``prompt``."""
    sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    told: Output | None = None
    async with aclosing(replica.generate(_request(kept, prompt + kept.answer_ids, sampling, 1))) as outputs:
        async for output in outputs:
            told = told or output
    length = len(kept.answer_ids)
    if told is None or len(told.prompt_logprobs) < length:
        raise InvalidRequestError("The replica tells no log-probabilities of a prompt.")
    return sum([entry.logprob for entry in told.prompt_logprobs[-length:]]) / length


def _request(kept: _Kept, prompt: Sequence[int], sampling: Sampling, n: int) -> GenerationRequest:
    return GenerationRequest(
        list(prompt), kept.root, sampling, use_cache=False, n=n, priority=BACKGROUND_PRIORITY, owner=kept.tenant
    )


def _info(replica: Replica) -> EngineInfo:
    assert replica.info is not None, "a ready replica has said what it serves"
    return replica.info


def _repeats_itself(info: EngineInfo) -> bool:
    """Whether greedy answers are the same however often one asks: on our engines in float32, cache included."""
    return info.num_blocks > 0 and info.dtype == "float32" and info.kv_dtype in ("", "float32")
