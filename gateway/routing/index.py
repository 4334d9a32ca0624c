"""The gateway's index: what each replica is believed to hold, how that is known, and how far it comes true.

A replica that tells of its cache by events is indexed exactly. Of one that does not, the index presumes that it keeps
what was sent to it, and corrects itself by the cached tokens that it reports. Either way each report is compared with
what the index said when the request went out, and an index that promises too much is not believed for a while.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from typing import Final, Literal

import msgspec
import structlog

from cache_policy.recency import RecencyIndex
from cache_policy.residency import ResidencyIndex
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, EngineInfo, Load, StepTiming
from gateway.config import IndexConfig
from gateway.plan import Plan
from gateway.replicas.base import Replica
from gateway.routing.agreement import Agreement

__all__ = ["Expectation", "FleetIndex", "IndexTrust"]

_NOTHING: Final[frozenset[bytes]] = frozenset()
_MAX_REMOVED: Final = 8192
"""Blocks of which is remembered that a replica has evicted them lately."""

_RESYNC_INTERVAL_S: Final = 30.0
"""A replica is asked no more often to tell again what it holds."""

_log = structlog.get_logger("headstart.index")


class IndexTrust(msgspec.Struct, frozen=True):
    """What the index has of one replica, and how far it came true.

    ``source`` is where it knows from: the replica's cache ``events``, or the ``requests`` that were sent to it. While
    it is not ``believed``, requests are placed as if the replica held nothing. ``precision`` is the share of the
    predicted tokens that were cached, ``recall`` the share of the cached tokens that had been predicted, over the last
    ``requests`` that had either; both None as long as there is nothing to tell. ``blocks`` is the number of entries, of
    at most ``capacity`` where it has a bound of its own. ``resyncs`` counts how often the index was begun anew for lack
    of trust.
    """

    source: Literal["events", "requests"]
    believed: bool
    precision: float | None
    recall: float | None
    requests: int
    blocks: int
    capacity: int | None
    resyncs: int


class Expectation:
    """What the index said of one request when it went out. Owned by the request's flight."""

    __slots__ = ("belief", "block_size", "keys", "life", "number", "removals", "uses")

    def __init__(
        self, belief: _Belief, keys: Sequence[bytes], block_size: int, uses: Sequence[int], number: int
    ) -> None:
        self.belief = belief
        self.life = belief.life
        self.keys = keys
        self.block_size = block_size
        self.uses = uses
        """One for each leading block that was predicted: which prompt had used it last, where that is what is known."""
        self.number = number
        self.removals = belief.removals

    @property
    def tokens(self) -> int:
        """Prompt tokens that were predicted to be cached."""
        return len(self.uses) * self.block_size


class _Belief:
    """What is known of one replica."""

    __slots__ = (
        "agreement",
        "believed",
        "cleared",
        "life",
        "recent",
        "removals",
        "removed",
        "replica",
        "resynced_at",
        "resyncs",
    )

    def __init__(self, replica: Replica, capacity: int) -> None:
        self.replica = replica
        self.recent = RecencyIndex(capacity)
        self.agreement = Agreement()
        self.believed = True
        self.life = 0
        self.resyncs = 0
        self.resynced_at = float("-inf")
        self.removals = 0
        self.cleared = 0  # the last of them that took everything
        self.removed: OrderedDict[bytes, int] = OrderedDict()  # what was evicted lately, and by which event

    @property
    def exact(self) -> bool:
        return self.replica.tells_events

    def begin(self, replica: Replica, capacity: int) -> None:
        """A new life, of which nothing is known."""
        self.replica = replica
        self.life += 1
        self.recent = RecencyIndex(capacity)
        self.agreement = Agreement()
        self.believed = True
        self.removed.clear()

    def note_removed(self, keys: Sequence[bytes]) -> None:
        """Blocks were evicted. Whoever was promised them meanwhile was not promised too much."""
        self.removals += 1
        for key in keys:
            self.removed[key] = self.removals
            self.removed.move_to_end(key)
        while len(self.removed) > _MAX_REMOVED:
            self.removed.popitem(last=False)

    def note_cleared(self) -> None:
        """All blocks are gone, or nothing is known of them any more."""
        self.removals += 1
        self.cleared = self.removals
        self.removed.clear()

    def took_back(self, expectation: Expectation, key: bytes) -> bool:
        """Whether the block of ``key`` was said to be gone after it had been promised."""
        return max(self.cleared, self.removed.get(key, 0)) > expectation.removals


class FleetIndex:
    """A ``ReplicaObserver``. Owns all that is believed of the replicas' caches; belongs to the event loop.

    ``clock`` gives seconds.
    """

    def __init__(self, config: IndexConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config: Final = config
        self._clock: Final = clock
        self._exact: Final = ResidencyIndex()
        self._beliefs: dict[str, _Belief] = {}

    # --- ReplicaObserver ---------------------------------------------------------------------------

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """A replica (re)started with an empty cache."""
        self._exact.cleared(replica.id)
        capacity = min(replica.cache_blocks or self._config.max_blocks, self._config.max_blocks)
        belief = self._beliefs.get(replica.id)
        if belief is None:
            self._beliefs[replica.id] = _Belief(replica, capacity)
        else:
            belief.begin(replica, capacity)

    def on_down(self, replica: Replica, reason: str) -> None:
        """A replica was lost together with its cache."""
        self._exact.forget(replica.id)
        belief = self._beliefs.get(replica.id)
        if belief is not None:
            belief.begin(replica, belief.recent.capacity)

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Keep the index equal to what the replica holds."""
        belief = self._beliefs.get(replica.id)
        for event in events:
            match event:
                case BlockStored():
                    self._exact.stored(replica.id, event.block_hashes)
                case BlockRemoved():
                    self._exact.removed(replica.id, event.block_hashes)
                    if belief is not None:
                        belief.note_removed(event.block_hashes)
                case AllBlocksCleared():
                    self._exact.cleared(replica.id)
                    if belief is not None:
                        belief.note_cleared()

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Nothing to keep."""

    def forget(self, replica_id: str) -> None:
        """The replica has left the fleet."""
        self._exact.forget(replica_id)
        self._beliefs.pop(replica_id, None)

    # --- what is believed --------------------------------------------------------------------------

    def holds(self, replica_id: str) -> Set[bytes]:
        """The block keys that a replica is believed to hold, for many membership tests within one decision.

        Not a copy: it may follow later events, and must not be changed.
        """
        belief = self._beliefs.get(replica_id)
        return self._known(belief) if belief is not None and belief.believed else _NOTHING

    def believes(self, replica_id: str) -> bool:
        """Whether requests are placed by what the index says of a replica; also before it was ready."""
        belief = self._beliefs.get(replica_id)
        return belief is None or belief.believed

    def trust(self, replica_id: str) -> IndexTrust | None:
        """How far the index of a replica can be trusted; None before the replica was ready for the first time."""
        belief = self._beliefs.get(replica_id)
        if belief is None:
            return None
        agreement = belief.agreement
        return IndexTrust(
            source="events" if belief.exact else "requests",
            believed=belief.believed,
            precision=agreement.precision,
            recall=agreement.recall,
            requests=agreement.requests,
            blocks=len(self._known(belief)),
            capacity=None if belief.exact else belief.recent.capacity,
            resyncs=belief.resyncs,
        )

    def size(self) -> int:
        """Entries over all replicas."""
        return sum(len(self._known(belief)) for belief in self._beliefs.values())

    # --- what becomes of it --------------------------------------------------------------------------

    def sent(self, plan: Plan) -> Expectation | None:
        """A request goes out to its replica. None where its cached tokens will say nothing about the index."""
        belief = self._beliefs.get(plan.replica_id)
        info = belief.replica.info if belief is not None else None
        if belief is None or info is None or not plan.use_cache:
            return None
        size = info.block_size
        readable = plan.keys[: (plan.length - 1) // size]  # the last prompt token is always computed
        if belief.exact:
            blocks = self._exact.match(plan.replica_id, readable)
            return Expectation(belief, readable, size, [0] * blocks, 0)
        uses = belief.recent.computed_uses(readable)
        return Expectation(belief, readable, size, uses, belief.recent.send(plan.keys))

    def computed(self, expectation: Expectation) -> None:
        """The prompt of a request is computed, or never will be. Safe to repeat."""
        if expectation.life == expectation.belief.life:
            expectation.belief.recent.settle(expectation.number)

    def reported(self, expectation: Expectation, cached_tokens: int) -> None:
        """The replica says how many prompt tokens of a request it had cached."""
        belief = expectation.belief
        if expectation.life != belief.life:
            return
        missed = -(-cached_tokens // expectation.block_size)  # some count tokens, not whole blocks
        promised = expectation.tokens
        if missed < len(expectation.uses):
            if not belief.exact:
                belief.recent.evicted(expectation.uses[missed])
            elif belief.took_back(expectation, expectation.keys[missed]):
                promised = cached_tokens  # it was gone before the request's turn came, and the index has said so
        belief.agreement.add(promised, cached_tokens)
        self._judge(belief)

    def _known(self, belief: _Belief) -> Set[bytes]:
        return self._exact.holds(belief.replica.id) if belief.exact else belief.recent.keys

    def _judge(self, belief: _Belief) -> None:
        """Stop believing an index that promises too much, and believe it again when it has come true for a while."""
        precision = belief.agreement.precision
        if precision is None:
            return
        if precision >= self._config.min_precision:
            if not belief.believed:
                belief.believed = True
                _log.info("index is believed again", replica=belief.replica.id, precision=round(precision, 3))
            return
        now = self._clock()
        if belief.believed:
            belief.believed = False
            _log.warning("index is not believed", replica=belief.replica.id, precision=round(precision, 3))
        if now - belief.resynced_at >= _RESYNC_INTERVAL_S:
            belief.resynced_at = now
            belief.resyncs += 1
            belief.agreement = Agreement()  # what comes now tells of the index that is told now
            if belief.exact:
                belief.replica.resync()
            else:
                belief.begin(belief.replica, belief.recent.capacity)
                belief.believed = False
