from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from cache_policy.keys import token_bytes
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, Load, StepTiming
from gateway.errors import ReplicaLost, ReplicaUnavailable
from gateway.plan import Plan
from gateway.replicas.base import ReplicaState
from gateway.routing.candidate import Candidate
from gateway.routing.flight import Flight
from gateway.routing.placement import place_tokens
from gateway.routing.router import Router
from gateway.stats.cost import PrefillCost

QuietReplica = Callable[..., Any]
STEP = StepTiming(64, 2016, 0, 0, 0.064)
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
        router.on_step(replica, STEP, load(0))
    return router


def resident(router: Router, replica_id: str) -> set[bytes]:
    (candidate,) = [candidate for candidate in router.candidates() if candidate.replica_id == replica_id]
    return set(candidate.resident)


def plan(replica_id: str, tokens: int = 100, cached: int = 0) -> Plan:
    return Plan(token_bytes(range(tokens)), b"", [], replica_id, cached, "t", "tenant", "none")


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


# --- failing, drained, unmeasured and drawn replicas ---------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def remote_router(clock: Clock, *replicas: Any) -> Router:
    """Of replicas that report nothing of their steps, each its own server."""
    router = Router(lambda id: PrefillCost(), clock=clock, draw=random.Random(3))
    for replica in replicas:
        replica.restarts = replica.forgiven = False
        router.on_ready(replica, replica.info)
    return router


def fail(router: Router, replica_id: str, times: int) -> None:
    for _ in range(times):
        with pytest.raises(ReplicaLost), router.dispatch(plan(replica_id)):
            raise ReplicaLost("gone", produced=False)


def ids(router: Router) -> set[str]:
    return {candidate.replica_id for candidate in router.candidates()}


def test_q8_a_replica_that_fails_everything_is_left_alone_although_it_looks_well(quiet_replica: QuietReplica) -> None:
    clock = Clock()
    bad, good = quiet_replica("bad"), quiet_replica("good")
    router = remote_router(clock, bad, good)
    fail(router, "bad", 3)
    assert ids(router) == {"good"}
    router.on_down(bad, "lost")
    router.on_ready(bad, bad.info)  # it was only seen again: it answered looks before too
    assert ids(router) == {"good"}
    clock.now += 1
    warm(router, good)
    assert place(router).replica_id == "bad", "the probe goes before a cache"
    with router.dispatch(plan("bad")) as flight:
        assert ids(router) == {"good"}, "one probe at a time"
        flight.prefilled()
    assert ids(router) == {"bad", "good"}
    assert router.view("bad").breaker == "closed"


def test_q8_when_all_fail_callers_are_told_when_to_come_back(quiet_replica: QuietReplica) -> None:
    router = remote_router(Clock(), quiet_replica("a"), quiet_replica("b"))
    for id in ("a", "b"):
        fail(router, id, 3)
    with pytest.raises(ReplicaUnavailable, match="failed 3 requests in a row") as caught:
        router.candidates()
    assert caught.value.retry_after == 1


def test_an_engine_that_was_started_again_owes_nothing_for_its_former_life(quiet_replica: QuietReplica) -> None:
    engine = quiet_replica("engine-0")
    router = make_router(engine)
    fail(router, "engine-0", 3)
    with pytest.raises(ReplicaUnavailable):
        router.candidates()
    router.on_ready(engine, engine.info)
    assert ids(router) == {"engine-0"}


def test_a_server_that_was_gone_and_is_back_is_not_left_alone_for_what_it_lost(quiet_replica: QuietReplica) -> None:
    server = quiet_replica("sole")
    router = remote_router(Clock(), server)
    fail(router, "sole", 20)
    router.on_down(server, "gone")
    with pytest.raises(ReplicaUnavailable):
        router.candidates()
    server.forgiven = True
    router.on_ready(server, server.info)
    for _ in range(20):
        router.dispatch(plan(*ids(router))).__enter__()


def test_a_drained_replica_gets_nothing_new_until_it_is_resumed(quiet_replica: QuietReplica) -> None:
    router = make_router(quiet_replica("engine-0"), quiet_replica("engine-1"))
    with router.dispatch(plan("engine-0")):
        router.drain("engine-0")
        assert ids(router) == {"engine-1"}
        assert router.view("engine-0").in_flight == 1
    router.drain("engine-1")
    with pytest.raises(ReplicaUnavailable, match="drained by the operator"):
        router.candidates()
    router.resume("engine-0")
    assert ids(router) == {"engine-0"}


def test_replicas_to_avoid_are_no_candidates(quiet_replica: QuietReplica) -> None:
    router = make_router(quiet_replica("engine-0"), quiet_replica("engine-1"))
    assert [candidate.replica_id for candidate in router.candidates({"engine-0"})] == ["engine-1"]
    with pytest.raises(ReplicaUnavailable, match="failed this request"):
        router.candidates({"engine-0", "engine-1"})


def serve(router: Router, clock: Clock, replica_id: str, tokens: int, seconds: float, cached: int = 0) -> None:
    with router.dispatch(plan(replica_id, tokens, cached)) as flight:
        clock.now += seconds
        flight.prefilled()
        flight.told(cached)


def test_what_remote_replicas_cost_is_learned_from_when_their_answers_begin(quiet_replica: QuietReplica) -> None:
    clock = Clock()
    router = remote_router(clock, quiet_replica("fast"), quiet_replica("slow"), quiet_replica("unknown"))
    assert router.view("slow").curve_from == "nominal"
    for tokens in (200, 400, 800, 1600) * 2:
        serve(router, clock, "fast", tokens, tokens * 1e-4)
        serve(router, clock, "slow", tokens, tokens * 1e-3)
        serve(router, clock, "fast", tokens, tokens * 0.5e-4, cached=tokens // 2)
    costs = {candidate.replica_id: candidate.expected_seconds(1000, 0) for candidate in router.candidates()}
    assert costs["fast"] == pytest.approx(0.1, rel=0.2)
    assert costs["slow"] == pytest.approx(1.0, rel=0.2)
    assert costs["unknown"] in (costs["fast"], costs["slow"]), "one that was not measured is as the others are"
    assert router.view("slow").curve_from == "ttft"


def test_what_waits_before_a_request_is_no_fault_of_its_prompt(quiet_replica: QuietReplica) -> None:
    clock = Clock()
    router = remote_router(clock, quiet_replica("a"))
    for _ in range(20):
        with ExitStack() as stack:
            flights = [stack.enter_context(router.dispatch(plan("a", 500))) for _ in range(4)]
            for flight in flights:
                clock.now += 0.05  # one after the other, a tenth of a millisecond a token
                flight.prefilled()
                flight.told(0)
    (candidate,) = router.candidates()
    assert candidate.expected_seconds(500, 0) == pytest.approx(0.05, rel=0.25)


def untimed(router: Router, clock: Clock, tokens: int = 100) -> Flight | None:
    """Send a request whose caller does not mind; it, unless it is to tell its time."""
    flight = router.dispatch(plan("a", tokens)).__enter__()
    return flight if flight.leave_untimed() else None


def test_of_requests_that_nobody_times_enough_are_timed_to_know_the_cost(quiet_replica: QuietReplica) -> None:
    clock = Clock()
    router = remote_router(clock, quiet_replica("a"))
    assert untimed(router, clock) is None, "nothing is known yet"
    for tokens in (200, 400, 800, 1600) * 2:
        serve(router, clock, "a", tokens, tokens * 1e-3)
    known = router.view("a").curve
    assert untimed(router, clock) is None, "the first one for a while"
    for _ in range(100):
        flight = untimed(router, clock)
        assert flight is not None
        clock.now += 0.002
        flight.prefilled()
        flight.told(0)
        flight.__exit__(None, None, None)
    assert router.view("a").curve == known, "their time says nothing"
    clock.now += 0.25
    assert untimed(router, clock) is None


def test_nobody_waits_for_an_untimed_prompt_longer_than_it_ought_to_take(quiet_replica: QuietReplica) -> None:
    clock = Clock()
    router = remote_router(clock, quiet_replica("a"))
    for tokens in (200, 400, 800, 1600) * 2:
        serve(router, clock, "a", tokens, tokens * 1e-3)
    timed = router.dispatch(plan("a", 100)).__enter__()
    assert not timed.leave_untimed()
    first, second = untimed(router, clock, 1000), untimed(router, clock, 500)
    assert first
    assert second
    assert router.view("a").waiting_tokens == 1600
    clock.now += 1.2
    assert router.view("a").waiting_tokens == 600
    second.prefilled()  # it was quicker than that
    assert router.view("a").waiting_tokens == 100
    clock.now += 10
    assert router.view("a").waiting_tokens == 100, "of the one that tells, until it tells"
    timed.prefilled()
    assert router.view("a").waiting_tokens == 0


def test_nobody_waits_behind_an_untimed_prompt_that_was_given_up(quiet_replica: QuietReplica) -> None:
    clock = Clock()
    router = remote_router(clock, quiet_replica("a"))
    for tokens in (200, 400, 800, 1600) * 2:
        serve(router, clock, "a", tokens, tokens * 1e-3)
    assert untimed(router, clock) is None
    long = untimed(router, clock, 100_000)
    assert long
    long.__exit__(None, None, None)
    assert router.view("a").waiting_tokens == 100, "that which tells its time"
    assert untimed(router, clock, 500)
    clock.now += 1.0
    assert router.view("a").waiting_tokens == 100


def test_a_whole_answer_that_takes_longer_than_a_request_may_is_no_failure_of_its_replica(
    quiet_replica: QuietReplica,
) -> None:
    clock = Clock()
    router = remote_router(clock, quiet_replica("a"))
    for tokens in (200, 400, 800, 1600) * 2:
        serve(router, clock, "a", tokens, tokens * 1e-3)
    timed = router.dispatch(plan("a")).__enter__()
    assert not timed.leave_untimed()
    flights = [untimed(router, clock) for _ in range(5)]
    clock.now += 600
    for flight in flights:
        assert flight
        flight.__exit__(None, None, None)
        flight.expired()
    assert router.view("a").failures == 0
    timed.expired()
    assert router.view("a").failures == 1, "its first token is late"


def test_a_probe_is_timed(quiet_replica: QuietReplica) -> None:
    clock = Clock()
    router = remote_router(clock, quiet_replica("a"))
    for tokens in (200, 400, 800, 1600) * 2:
        serve(router, clock, "a", tokens, tokens * 1e-3)
    fail(router, "a", 3)
    clock.now += 1
    probe = router.dispatch(plan("a")).__enter__()
    assert untimed(router, clock) is None
    assert untimed(router, clock) is not None
    assert not probe.leave_untimed(), "whoever waits for a replica to be well need not wait for a whole answer"


def test_noise_in_what_was_measured_prefers_nobody(quiet_replica: QuietReplica) -> None:
    clock = Clock()
    names = ["a", "b", "c"]
    router = remote_router(clock, *map(quiet_replica, names))
    for number, name in enumerate(names):
        for tokens in (200, 400, 800) * 3:
            serve(router, clock, name, tokens, tokens * 1e-3 * (1 + 0.1 * number))
    chosen = []
    for _ in range(6):
        chosen.append(place(router).replica_id)
        serve(router, clock, chosen[-1], 64, 0.064)
    assert Counter(chosen) == dict.fromkeys(names, 2)


def test_under_load_few_drawn_replicas_and_the_one_that_holds_most_are_looked_at(quiet_replica: QuietReplica) -> None:
    replicas = [quiet_replica(f"engine-{number}") for number in range(8)]
    router = make_router(*replicas)
    with ExitStack() as stack:
        for replica in replicas:
            for _ in range(5):
                stack.enter_context(router.dispatch(plan(replica.id))).prefilled()
        drawn = [{c.replica_id for c in router.candidates() if c.drawn} for _ in range(20)]
        assert {len(few) for few in drawn} == {3}
        assert len(set().union(*drawn)) > 4
        warm(router, replicas[6])
        assert {place(router).replica_id for _ in range(20)} == {"engine-6"}
        for replica in replicas:
            warm(router, replica)  # what all hold attracts nobody
        assert len({place(router).replica_id for _ in range(20)}) > 2


def test_where_no_index_is_believed_a_conversation_stays_where_its_key_belongs(quiet_replica: QuietReplica) -> None:
    names = [f"engine-{number}" for number in range(4)]
    router = make_router(*map(quiet_replica, names))
    candidates = [msgspec.structs.replace(candidate, indexed=False) for candidate in router.candidates()]

    def home(key: int, among: Sequence[Candidate] = candidates) -> str:
        tokens = list(range(key, key + 64))
        return place_tokens(
            tokens, among, lambda candidate: b"r" * 16, use_cache=True, affinity=b"%d" % key
        ).candidate.replica_id

    homes = {key: home(key) for key in range(200)}
    assert homes == {key: home(key) for key in range(200)}
    counts = Counter(homes.values())
    assert set(counts) == set(names)
    assert max(counts.values()) < 100
    fewer = candidates[1:]
    assert all(home(key, fewer) == at for key, at in homes.items() if at != candidates[0].replica_id)
    busy = [
        msgspec.structs.replace(candidate, waiting_tokens=1000 * (candidate.replica_id == homes[0]))
        for candidate in candidates
    ]
    assert home(0, busy) != homes[0], "affinity is no reason to queue"
