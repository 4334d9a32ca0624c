"""What is believed of the replicas' caches, and how far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cache_policy.keys import token_bytes
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored
from gateway.config import IndexConfig
from gateway.plan import Plan
from gateway.routing.agreement import MIN_REQUESTS, WINDOW, Agreement
from gateway.routing.index import FleetIndex, IndexTrust

QuietReplica = Callable[..., Any]
SIZE = 16
KEYS = tuple(bytes([number]) * 16 for number in range(40))


def plan(blocks: int, replica_id: str = "engine-0", *, use_cache: bool = True) -> Plan:
    """A prompt of so many blocks and one token more."""
    tokens = list(range(blocks * SIZE + 1))
    return Plan(
        token_bytes(tokens), b"", list(KEYS[:blocks]), replica_id, 0, "t", "tenant", "none", use_cache=use_cache
    )


class Bench:
    """An index over one replica, and a clock that stands still."""

    def __init__(self, replica: Any, *, events: bool = True, **settings: Any) -> None:
        self.now = 100.0
        self.replica = replica
        replica.tells_events = events
        self.index = FleetIndex(IndexConfig(**settings), lambda: self.now)
        self.index.on_ready(replica, replica.info)

    def ask(self, request: Plan, cached: int) -> int:
        """Send a request of which ``cached`` tokens are reported. Returns what was predicted."""
        expectation = self.index.sent(request)
        assert expectation is not None
        self.index.computed(expectation)
        self.index.reported(expectation, cached)
        return expectation.tokens

    @property
    def trust(self) -> IndexTrust:
        trust = self.index.trust(self.replica.id)
        assert trust is not None
        return trust

    @property
    def held(self) -> set[bytes]:
        return set(self.index.holds(self.replica.id))


def test_of_a_replica_that_tells_events_the_index_holds_what_they_say(quiet_replica: QuietReplica) -> None:
    bench = Bench(quiet_replica())
    bench.index.on_events(bench.replica, (BlockStored(KEYS[:4], None, SIZE), BlockRemoved(KEYS[3:4])))
    assert bench.ask(plan(6), 48) == 48
    assert bench.held == set(KEYS[:3])  # what was sent is not what is held
    assert (bench.trust.source, bench.trust.precision, bench.trust.recall) == ("events", None, 1.0)
    bench.index.on_events(bench.replica, (AllBlocksCleared(),))
    assert bench.held == set()


def test_of_a_replica_that_tells_none_it_presumes_what_was_sent_within_bounds(quiet_replica: QuietReplica) -> None:
    bench = Bench(quiet_replica(num_blocks=0), events=False, max_blocks=5)
    assert [bench.ask(plan(3), 0), bench.ask(plan(8), 48), bench.ask(plan(8), 80)] == [0, 48, 80]
    assert bench.held == set(KEYS[:5])
    assert (bench.trust.source, bench.trust.blocks, bench.trust.capacity) == ("requests", 5, 5)


def test_a_report_corrects_what_was_presumed(quiet_replica: QuietReplica) -> None:
    bench = Bench(quiet_replica(), events=False)
    bench.ask(plan(20), 0)
    other = Plan(token_bytes(range(49)), b"", [b"o" * 16, b"p" * 16, b"q" * 16], "engine-0", 0, "t", "tenant", "none")
    bench.ask(other, 0)
    assert bench.ask(plan(4), 32) == 64  # two of its blocks have gone, and with them all that is as old
    assert bench.held == {*KEYS[:4], *other.keys}


def test_a_prompt_that_is_still_computed_proves_nothing(quiet_replica: QuietReplica) -> None:
    bench = Bench(quiet_replica(), events=False)
    bench.ask(plan(2), 0)
    first = bench.index.sent(plan(4))
    second = bench.index.sent(plan(4))
    assert first is not None
    assert second is not None
    assert bench.held == set(KEYS[:4])
    bench.index.reported(second, 0)  # computed side by side
    assert bench.held == set(KEYS[:4])
    assert bench.trust.requests == 0
    bench.index.computed(first)
    assert second.tokens == 0


def test_requests_that_bypass_the_cache_or_outlive_the_replica_are_not_counted(quiet_replica: QuietReplica) -> None:
    bench = Bench(quiet_replica())
    bench.index.on_events(bench.replica, (BlockStored(KEYS, None, SIZE),))
    assert bench.index.sent(plan(4, use_cache=False)) is None
    assert bench.index.sent(plan(4, "nowhere")) is None
    expectation = bench.index.sent(plan(4))
    assert expectation is not None
    bench.index.on_down(bench.replica, "killed")
    bench.index.on_ready(bench.replica, bench.replica.info)
    bench.index.reported(expectation, 0)
    assert bench.trust.requests == 0


@pytest.mark.parametrize("events", [True, False])
def test_an_index_that_promises_too_much_is_not_believed_until_it_comes_true(
    quiet_replica: QuietReplica, events: bool
) -> None:
    bench = Bench(quiet_replica(), events=events)

    def hold() -> None:
        """Have the index believe that the prompt is there."""
        bench.index.on_events(bench.replica, (BlockStored(KEYS, None, SIZE),))
        bench.ask(plan(10), 160)

    hold()
    asked = 0
    while bench.trust.believed:
        asked += 1
        bench.ask(plan(10), 16)
        assert asked < 4 * MIN_REQUESTS
    assert asked > 3
    assert bench.held == set()
    assert (bench.trust.resyncs, bench.replica.resyncs) == (1, events)
    assert bench.trust.requests == 0  # begun anew
    for _ in range(MIN_REQUESTS + 1):
        assert not bench.trust.believed
        hold()
        if bench.trust.believed:
            break
    assert bench.trust.believed
    assert bench.held


def test_what_was_evicted_before_a_requests_turn_came_is_no_broken_promise(quiet_replica: QuietReplica) -> None:
    bench = Bench(quiet_replica())
    for _ in range(2 * MIN_REQUESTS):
        bench.index.on_events(bench.replica, (BlockStored(KEYS[:6], None, SIZE),))
        expectation = bench.index.sent(plan(6))
        assert expectation is not None
        assert expectation.tokens == 96
        bench.index.on_events(bench.replica, (BlockRemoved(KEYS[2:6]),))
        bench.index.on_events(bench.replica, (BlockStored(KEYS[2:6], KEYS[1], SIZE),))  # the request's own doing
        bench.index.reported(expectation, 32)
    assert (bench.trust.believed, bench.trust.precision, bench.replica.resyncs) == (True, 1.0, 0)
    for _ in range(MIN_REQUESTS):
        bench.ask(plan(6), 0)  # evicted long ago, and stored again since
    assert not bench.trust.believed


def test_what_was_cleared_before_a_requests_turn_came_is_no_broken_promise(quiet_replica: QuietReplica) -> None:
    bench = Bench(quiet_replica())
    for _ in range(2 * MIN_REQUESTS):
        bench.index.on_events(bench.replica, (BlockStored(KEYS[:6], None, SIZE),))
        expectation = bench.index.sent(plan(6))
        assert expectation is not None
        bench.index.on_events(bench.replica, (AllBlocksCleared(), BlockStored(KEYS[:6], None, SIZE)))
        bench.index.reported(expectation, 0)
    assert (bench.trust.believed, bench.trust.requests, bench.replica.resyncs) == (True, 0, 0)
    for _ in range(MIN_REQUESTS):
        bench.ask(plan(6), 0)  # cleared long ago, and stored again since
    assert not bench.trust.believed


def test_a_lying_replica_is_not_asked_again_and_again(quiet_replica: QuietReplica) -> None:
    bench = Bench(quiet_replica())
    bench.index.on_events(bench.replica, (BlockStored(KEYS, None, SIZE),))
    for _ in range(10 * MIN_REQUESTS):
        bench.ask(plan(10), 0)
    assert bench.replica.resyncs == 1
    bench.now += 60.0
    bench.ask(plan(10), 0)
    assert bench.replica.resyncs == 2


def test_agreement_covers_a_window_and_ignores_what_tells_nothing() -> None:
    agreement = Agreement()
    for _ in range(MIN_REQUESTS):
        agreement.add(0, 0)
    assert (agreement.requests, agreement.precision, agreement.recall) == (0, None, None)
    for _ in range(MIN_REQUESTS):
        agreement.add(100, 0)
    assert (agreement.precision, agreement.recall) == (0.0, None)
    for _ in range(WINDOW):
        agreement.add(50, 100)
    assert (agreement.requests, agreement.precision, agreement.recall) == (WINDOW, 1.0, 0.5)
