from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, Load
from gateway.errors import ReplicaUnavailable
from gateway.plan import Plan
from gateway.replicas.base import ReplicaState
from gateway.routing.placement import place_tokens
from gateway.routing.router import Candidate, Router

QuietReplica = Callable[..., Any]
KEYS = tuple(bytes([number]) * 16 for number in range(6))


class Linear:
    """A millisecond per token, times ``slowness``."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.slowness = slowness

    def seconds(self, tokens: int, context: int) -> float:
        return tokens * 1e-3 * self.slowness


def make_router(*replicas: Any, slowness: dict[str, float] | None = None) -> Router:
    router = Router(lambda id: Linear((slowness or {}).get(id, 1.0)))
    for replica in replicas:
        router.on_ready(replica, replica.info)
    return router


def resident(router: Router, replica_id: str) -> set[bytes]:
    (candidate,) = [candidate for candidate in router.candidates() if candidate.replica_id == replica_id]
    return set(candidate.resident)


def plan(replica_id: str, tokens: int = 100, cached: int = 0) -> Plan:
    return Plan(list(range(tokens)), b"", [], replica_id, cached, "t", "tenant", "none")


def load(queued: int) -> Load:
    return Load(1, 1, queued, 0, 0, 0, 0, 0, 0, 1)


def test_the_index_follows_the_replicas_events(quiet_replica: QuietReplica) -> None:
    one, other = quiet_replica("engine-0"), quiet_replica("engine-1")
    router = make_router(one, other)
    router.on_events(one, (BlockStored(KEYS[:3], None, 16), BlockRemoved(KEYS[2:3])))
    router.on_events(other, (BlockStored(KEYS[3:], None, 16),))
    assert (resident(router, "engine-0"), resident(router, "engine-1")) == (set(KEYS[:2]), set(KEYS[3:]))
    assert router.index.size() == 5
    router.on_events(other, (AllBlocksCleared(),))
    assert resident(router, "engine-1") == set()


def test_q2_a_restarted_replica_is_credited_with_nothing_of_its_former_life(quiet_replica: QuietReplica) -> None:
    replica = quiet_replica()
    router = make_router(replica)
    router.on_events(replica, (BlockStored(KEYS, None, 16),))
    router.on_down(replica, "killed")
    assert router.index.size() == 0
    router.on_ready(replica, replica.info)
    assert resident(router, "engine-0") == set()
    router.on_events(replica, (BlockStored(KEYS, None, 16),))
    router.on_ready(replica, replica.info)  # seen again without having been seen to go
    assert resident(router, "engine-0") == set()


def test_only_ready_replicas_are_candidates_and_none_is_a_clear_refusal(quiet_replica: QuietReplica) -> None:
    one, other = quiet_replica("engine-0"), quiet_replica("engine-1")
    router = make_router(one, other)
    one.state, one.down_reason = ReplicaState.DOWN, "killed by signal 9"
    assert [candidate.replica_id for candidate in router.candidates()] == ["engine-1"]
    other.state = ReplicaState.STARTING
    with pytest.raises(ReplicaUnavailable, match="killed by signal 9") as caught:
        router.candidates()
    assert caught.value.retry_after is not None
    with pytest.raises(ReplicaUnavailable, match="none has started"):
        make_router().candidates()


def test_requests_in_flight_are_counted_until_they_end_however_they_end(quiet_replica: QuietReplica) -> None:
    router = make_router(quiet_replica())

    def state() -> tuple[int, int]:
        (candidate,) = router.candidates()
        return candidate.in_flight, candidate.waiting_tokens

    with router.dispatch(plan("engine-0", 100, 40)) as flight, router.dispatch(plan("engine-0", 100)):
        assert state() == (2, 160)
        flight.prefilled()
        flight.prefilled()
        assert state() == (2, 100)
    assert state() == (0, 0)
    with pytest.raises(RuntimeError), router.dispatch(plan("engine-0")):
        raise RuntimeError
    assert state() == (0, 0)


def test_what_other_gateways_queued_counts_too(quiet_replica: QuietReplica) -> None:
    replica = quiet_replica()
    router = make_router(replica)
    replica.load = load(500)
    assert router.candidates()[0].waiting_tokens == 500
    assert router.candidates()[0].expected_seconds(100, 60) == pytest.approx(0.540)


def place(router: Router, tokens: int = 64) -> Candidate:
    return place_tokens(list(range(tokens)), router.candidates(), lambda candidate: b"r" * 16, use_cache=True).candidate


def warm(router: Router, replica: Any, tokens: int = 64) -> None:
    placement = place_tokens(list(range(tokens)), router.candidates(), lambda candidate: b"r" * 16, use_cache=True)
    router.on_events(replica, (BlockStored(tuple(placement.keys), None, 16),))


def test_a_request_goes_where_its_prefix_is(quiet_replica: QuietReplica) -> None:
    replicas = [quiet_replica(f"engine-{number}") for number in range(3)]
    router = make_router(*replicas)
    warm(router, replicas[2])
    assert [place(router).replica_id for _ in range(5)] == ["engine-2"] * 5


def test_a_long_queue_outweighs_a_short_prefix(quiet_replica: QuietReplica) -> None:
    warm_one, idle = quiet_replica("engine-0"), quiet_replica("engine-1")
    router = make_router(warm_one, idle)
    warm(router, warm_one)
    warm_one.load = load(1000)
    assert place(router).replica_id == "engine-1"


def test_equal_replicas_take_turns(quiet_replica: QuietReplica) -> None:
    router = make_router(*(quiet_replica(f"engine-{number}") for number in range(3)))
    chosen = []
    for _ in range(6):
        chosen.append(place(router).replica_id)
        with router.dispatch(plan(chosen[-1])) as flight:
            flight.prefilled()
    assert Counter(chosen) == {"engine-0": 2, "engine-1": 2, "engine-2": 2}


def test_q7_one_shared_prefix_does_not_pile_up_on_one_replica(quiet_replica: QuietReplica) -> None:
    replicas = [quiet_replica(f"engine-{number}") for number in range(4)]
    router = make_router(*replicas)
    warm(router, replicas[0], 1008)
    flights = []
    for _ in range(64):
        chosen = place(router, 1024).replica_id
        flight = router.dispatch(plan(chosen, 1024, 1008 if chosen == "engine-0" else 0))
        flight.__enter__().prefilled()  # long answers: prompts are computed, slots stay taken
        flights.append((chosen, flight))
    counts = Counter(chosen for chosen, _ in flights)
    assert max(counts.values()) / (64 / 4) <= 1.5
    for _, flight in flights:
        flight.__exit__(None, None, None)


def test_q7_light_load_stays_with_its_cache(quiet_replica: QuietReplica) -> None:
    replicas = [quiet_replica(f"engine-{number}") for number in range(4)]
    router = make_router(*replicas)
    warm(router, replicas[3], 1008)
    chosen = []
    for _ in range(20):
        with router.dispatch(plan("engine-3", 1024, 1008)) as flight:
            flight.prefilled()
            chosen.append(place(router, 1024).replica_id)
    assert set(chosen) == {"engine-3"}


def test_q7_a_slow_replica_gets_little(quiet_replica: QuietReplica) -> None:
    replicas = [quiet_replica(f"engine-{number}") for number in range(4)]
    router = make_router(*replicas, slowness={"engine-1": 10.0})
    counts: Counter[str] = Counter()
    running: list[Any] = []
    for number in range(400):
        if len(running) == 8:
            running.pop(0).__exit__(None, None, None)
        tokens = list(range(number * 100, number * 100 + 64))
        chosen = place_tokens(tokens, router.candidates(), lambda candidate: b"r" * 16, use_cache=True).candidate
        counts[chosen.replica_id] += 1
        flight = router.dispatch(plan(chosen.replica_id, 64))
        flight.__enter__()
        running.append(flight)
    assert counts["engine-1"] < 40
    for flight in running:
        flight.__exit__(None, None, None)


def test_somebody_may_always_take_the_next_request(quiet_replica: QuietReplica) -> None:
    router = make_router(*(quiet_replica(f"engine-{number}") for number in range(3)))
    entered = []
    for number in itertools.islice(itertools.cycle(range(3)), 40):
        assert router.candidates()
        flight = router.dispatch(plan(f"engine-{number}"))
        flight.__enter__()
        entered.append(flight)
    for flight in entered:
        flight.__exit__(None, None, None)
