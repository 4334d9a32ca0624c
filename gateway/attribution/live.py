"""Why the tokens of each answered request were missed, found out when its answer has been sent.

Offline analysis judges prompts as applications wrote them; here it is those that the replicas really got. A token is
counted as evicted where an endless cache would still have had it, and as elsewhere where another replica has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from cache_policy.keys import token_list
from engine.wire import AllBlocksCleared, BlockRemoved, CacheEvent, EngineInfo, Load, StepTiming
from gateway.attribution.ages import age_bucket
from gateway.attribution.causes import Run, Sighting, runs
from gateway.attribution.history import Cause, PartHistory, Verdict
from gateway.attribution.memory import AHEAD_TOKENS, CommonPrefix, TokenMemory
from gateway.attribution.part import Part
from gateway.logs import where_from
from gateway.plan import Plan
from gateway.replicas.base import Replica

__all__ = ["Judged", "KeptExample", "LiveAttribution"]

_REMEMBERED_PARTS: Final = 100_000
_REMEMBERED_EVICTIONS: Final = 100_000
_MOST_EXAMPLES: Final = 1024
_EXAMPLE_AGES_S: Final = 60.0
"""A younger example replaces one that is older than that, however little it cost."""

_BEHIND: Final[frozenset[Cause]] = frozenset(("volatile", "document_order", "tool_order", "text_form"))

_log = structlog.get_logger("headstart.attribution")


class Judged(msgspec.Struct, frozen=True):
    """One request's missed tokens, all of them, by cause.

    ``runs`` are the same from the first to the last, ``parts`` what the prompt is made of and ``ends`` where each of
    them ends, in tokens. ``evicted_ages`` are those of cause ``evicted`` by how long ago that was, where it is known.
    """

    missed: Mapping[Cause, int]
    runs: Sequence[Run]
    parts: Sequence[Part] = ()
    ends: Sequence[int] = ()
    evicted_ages: Mapping[int, int] = {}


class KeptExample(msgspec.Struct, frozen=True):
    """Where a prompt left those before it, for one cause and template, as token ids: texts stay in this process.

    ``part`` says in which kind of part that is, ``tokens`` how many were missed, ``at`` when (Unix time).
    """

    at: float
    part: str
    tokens: int
    token: int
    before: Sequence[int]
    here: Sequence[int]
    there: Sequence[int]


class LiveAttribution:
    """A ``ReplicaObserver``. Owns the history of parts and of evictions, and the examples; belongs to the event loop.

    ``memory`` holds the prompts before; the requests judged here are added to it. All memories are bounded: what was
    forgotten counts as never seen. ``clock`` tells Unix time.
    """

    def __init__(self, memory: TokenMemory, *, clock: Callable[[], float] = time.time) -> None:
        self._memory: Final = memory
        self._clock: Final = clock
        self._history: Final = PartHistory(_REMEMBERED_PARTS)
        self._serial = 0
        self._evicted: dict[bytes, float] = {}
        self._evicted_before: dict[bytes, float] = {}  # the older half
        self._cleared_at: float | None = None
        self._examples: dict[tuple[Cause, str], KeptExample] = {}
        self._failed = False

    # --- ReplicaObserver ---------------------------------------------------------------------------

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """A replica that comes back has lost all it held."""

    def on_down(self, replica: Replica, reason: str) -> None:
        """All it held is lost."""
        self._cleared_at = self._clock()

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Keep in mind when blocks were evicted."""
        for event in events:
            match event:
                case BlockRemoved():
                    self._evicted.update(dict.fromkeys(event.block_hashes, self._clock()))
                    if len(self._evicted) > _REMEMBERED_EVICTIONS // 2:
                        self._evicted_before, self._evicted = self._evicted, {}
                case AllBlocksCleared():
                    self._cleared_at = self._clock()

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Nothing to keep."""

    # --- requests ----------------------------------------------------------------------------------

    def judge(self, plan: Plan, block_size: int, cached: int, elsewhere: int) -> Judged:
        """The causes of the tokens of ``plan`` that were missed, of which ``cached`` were not; remembers its prompt.

        ``elsewhere`` tokens were held by another replica when it was sent.
        """
        length = plan.length
        try:
            return self._judge(plan, block_size, cached, elsewhere)
        except Exception as error:  # a prompt nobody has thought of must not cost an answer, nor a token its cause
            if not self._failed:
                self._failed = True
                _log.error("a request's misses could not be attributed", error=where_from(error))
            run = Run("never_seen", cached, length)
            return Judged({"never_seen": length - cached} if length > cached else {}, [run])

    @property
    def examples(self) -> Mapping[tuple[Cause, str], KeptExample]:
        """The latest costly example by cause and template."""
        return self._examples

    # --- inside ------------------------------------------------------------------------------------

    def _judge(self, plan: Plan, size: int, cached: int, elsewhere: int) -> Judged:
        length, bypass = plan.length, not plan.use_cache
        parts: Sequence[Part] = ()
        ends: Sequence[int] = ()
        verdicts: Sequence[Verdict] = ()
        if plan.anatomy is not None:
            parts, ends = plan.anatomy()
        common = CommonPrefix(0, None)
        if not bypass:
            self._serial += 1
            common = self._memory.remember(plan.root, plan.tokens, self._serial)
            if parts:
                verdicts = self._history.judge(plan.root, parts, self._serial)
        endless = min(common.tokens, length - 1) // size * size  # the last token is always computed
        sighting = Sighting(
            length=length,
            cached=cached,
            remembered=endless,
            common=common.tokens,
            ends=ends if verdicts else (),
            elsewhere=elsewhere,
            block_size=size,
            bypass=bypass,
        )
        found = runs(sighting, verdicts)
        missed: dict[Cause, int] = {}
        ages: dict[int, int] = {}
        for run in found:
            missed[run.cause] = missed.get(run.cause, 0) + run.end - run.start
            if run.cause == "evicted":
                self._age(plan.keys[run.start // size : run.end // size], size, ages)
        self._keep_examples(plan, found, common, parts, ends)
        return Judged(missed, found, parts, ends, ages)

    def _age(self, keys: Sequence[bytes], size: int, ages: dict[int, int]) -> None:
        now = self._clock()
        for key in keys:
            at = self._evicted.get(key) or self._evicted_before.get(key) or self._cleared_at
            if at is not None:
                bucket = age_bucket(now - at)
                ages[bucket] = ages.get(bucket, 0) + size

    def _keep_examples(
        self, plan: Plan, found: Sequence[Run], common: CommonPrefix, parts: Sequence[Part], ends: Sequence[int]
    ) -> None:
        now, template = self._clock(), plan.template
        for run in found:
            kept = self._examples.get((run.cause, template))
            if kept is None:
                if len(self._examples) >= _MOST_EXAMPLES:
                    continue
            elif kept.tokens >= run.end - run.start and now - kept.at < _EXAMPLE_AGES_S:
                continue
            # What stands behind a difference is missed for what it is behind.
            parted = run.start <= common.tokens < run.end or (run.cause in _BEHIND and common.tokens < run.end)
            token = common.tokens if parted else run.start
            ids = plan.token_ids
            self._examples[run.cause, template] = KeptExample(
                now,
                _kind(token, parts, ends),
                run.end - run.start,
                token,
                ids[max(0, token - AHEAD_TOKENS) : token],
                ids[token : token + AHEAD_TOKENS],
                token_list(common.ahead) if parted else (),
            )


def _kind(token: int, parts: Sequence[Part], ends: Sequence[int]) -> str:
    """The kind of part that ``token`` is in, with the name of the field whose value it is."""
    for part, end in zip(parts, ends, strict=True):
        if token < end:
            return f"value of {part.label}" if part.kind == "value" else part.kind
    return "prompt"
