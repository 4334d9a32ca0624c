"""The statistics service in the process: what observers and records say is what snapshots show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.wire import EngineInfo, Load, StepTiming
from gateway.config import RedisConfig
from gateway.replicas.base import ReplicaState
from gateway.stats.statistics import Statistics

Record = Callable[..., Any]
NOW = 1_700_000_080.0  # forty seconds into a minute


class FakeReplica:
    """As much of a replica as statistics look at."""

    def __init__(self, name: str = "engine-0") -> None:
        self.id = name
        self.state = ReplicaState.READY
        self.url: str | None = None
        self.restarts = True
        self.down_reason: str | None = None
        self.info: EngineInfo | None = None
        self.load: Load | None = None


def info(boot_id: str = "one", **changes: Any) -> EngineInfo:
    fields: dict[str, Any] = {
        "model": "m",
        "root": "/nowhere",
        "fingerprint": "f",
        "boot_id": boot_id,
        "max_model_len": 512,
        "num_blocks": 64,
        "block_size": 16,
        "dtype": "float32",
        "device": "cpu",
        "vocab_size": 1000,
        "eos_token_ids": (2,),
        "policy": "lru",
        "max_batch_tokens": 256,
        "profile": (StepTiming(16, 120, 0, 0, 0.03), StepTiming(256, 32640, 0, 0, 0.27)),
    }
    return EngineInfo(**(fields | changes))


def load(evictions: int = 0, preemptions: int = 0) -> Load:
    return Load(2, 1, 40, 10, 20, 34, evictions, preemptions, 0, 5)


def step(statistics: Statistics, replica: FakeReplica, report: Load) -> None:
    replica.load = report
    statistics.on_step(replica, StepTiming(0, 0, 2, 100, 0.05), report)


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica()


@pytest.fixture
def statistics(replica: FakeReplica) -> Statistics:
    statistics = Statistics(RedisConfig(url="redis://localhost:1"), clock=lambda: NOW)
    statistics.add_replica(replica)
    return statistics


def test_a_replica_is_shown_from_before_its_first_report(statistics: Statistics, replica: FakeReplica) -> None:
    replica.state = ReplicaState.STARTING
    row = statistics.snapshot().replicas["engine-0"]
    assert (row.state, row.blocks, row.requests, row.token_hit_rate) == ("starting", None, 0, None)


def test_the_pool_is_shown_as_the_replica_reports_it(statistics: Statistics, replica: FakeReplica) -> None:
    replica.info = info()
    statistics.on_ready(replica, replica.info)
    step(statistics, replica, load())
    row = statistics.snapshot().replicas["engine-0"]
    assert row.blocks is not None
    assert (row.blocks.used, row.blocks.cached, row.blocks.free, row.blocks.total) == (10, 20, 34, 64)
    assert (row.model, row.running, row.waiting, row.state) == ("m", 2, 1, "ready")


def test_a_lost_replica_shows_its_reason(statistics: Statistics, replica: FakeReplica) -> None:
    replica.state, replica.down_reason = ReplicaState.DOWN, "exit status 9"
    statistics.on_down(replica, "exit status 9")
    row = statistics.snapshot().replicas["engine-0"]
    assert (row.state, row.down_reason) == ("down", "exit status 9")


def test_evictions_add_up_over_restarts_and_are_not_counted_again_after_a_reconnection(
    statistics: Statistics, replica: FakeReplica
) -> None:
    statistics.on_ready(replica, info("one"))
    step(statistics, replica, load(evictions=5))
    step(statistics, replica, load(evictions=8, preemptions=1))
    statistics.on_ready(replica, info("one"))  # the connection was lost, the engine lived on
    step(statistics, replica, load(evictions=9, preemptions=1))
    statistics.on_ready(replica, info("two"))  # a new life, counting from 0
    step(statistics, replica, load(evictions=2, preemptions=1))
    snapshot = statistics.snapshot(window_minutes=1)
    assert (snapshot.totals.evictions, snapshot.totals.preemptions) == (11, 2)
    assert snapshot.replicas["engine-0"].evictions == 11
    assert snapshot.templates == {}


def test_the_cost_curve_of_a_replica_comes_from_its_profile_and_follows_its_steps(
    statistics: Statistics, replica: FakeReplica
) -> None:
    assert not statistics.prefill_cost("engine-0").fitted
    statistics.on_ready(replica, info())
    cost = statistics.prefill_cost("engine-0")
    assert cost.max_batch_tokens == 256
    before = cost.seconds(256, 0)
    assert before == pytest.approx(0.27, rel=0.1)
    for _ in range(300):
        statistics.on_step(replica, StepTiming(256, 32640, 0, 0, 0.54), load())
    assert statistics.prefill_cost("engine-0").seconds(256, 0) == pytest.approx(0.54, rel=0.1)


def test_a_replica_that_has_left_leaves_nothing_behind_whatever_comes_late(
    statistics: Statistics, replica: FakeReplica
) -> None:
    statistics.on_ready(replica, info())
    assert statistics.prefill_cost("engine-0").fitted
    statistics.remove_replica("engine-0")
    step(statistics, replica, load(evictions=3))
    assert not statistics.prefill_cost("engine-0").fitted
    assert not statistics._costs
    assert not statistics._counters


def test_windows_and_minutes_hold_what_finished_in_them(statistics: Statistics, record: Record) -> None:
    for age in (0, 30, 200, 4000, 100_000):
        statistics.record(record(finished_at=NOW - age))
    assert statistics.snapshot().totals.requests == 5
    assert [statistics.snapshot(window_minutes=m).totals.requests for m in (1, 5, 60, 1440)] == [2, 3, 3, 4]
    snapshot = statistics.snapshot(minutes=5, by="template")
    assert [row.requests for row in snapshot.minutes] == [0, 1, 0, 0, 2]
    assert [row.time % 60 for row in snapshot.minutes] == [0] * 5
    assert snapshot.minutes[-1].groups is not None
    assert snapshot.minutes[-1].groups["support"].requests == 2
    assert statistics.snapshot(minutes=0).minutes == []


@pytest.mark.parametrize(("window", "step_s", "length"), [(60, 60, 60), (1440, 600, 144), (None, 600, 144)])
def test_series_cover_their_window_in_even_steps(
    window: int | None, step_s: int, length: int, statistics: Statistics, record: Record
) -> None:
    for age in range(0, 3000, 50):
        statistics.record(record(finished_at=NOW - age))
    series = statistics.series(window_minutes=window)
    assert (series.step_s, len(series.time), sum(series.requests)) == (step_s, length, 60)
    assert {b - a for a, b in zip(series.time, series.time[1:], strict=False)} == {step_s}
    assert series.time[-1] <= NOW < series.time[-1] + step_s
    assert sum(series.saved_prefill_s) == pytest.approx(60 * 0.0625)


def test_the_short_series_moves_in_ten_seconds(replica: FakeReplica, record: Record) -> None:
    now = NOW
    statistics = Statistics(RedisConfig(url="redis://localhost:1"), clock=lambda: now)
    statistics.add_replica(replica)
    for second in range(60):
        now = NOW + second
        statistics._recent.observe(statistics._live_totals(), now)
        statistics.record(record(finished_at=now))
    series = statistics.series(window_minutes=15)
    assert (series.step_s, series.requests) == (10, [10] * 6)
    assert series.ttft_p50_s == [pytest.approx(0.25, rel=0.26)] * 6


def test_the_shortest_window_shows_its_own_steps_and_how_long_ago_what_they_missed_was_evicted(
    replica: FakeReplica, record: Record
) -> None:
    now = NOW
    statistics = Statistics(RedisConfig(url="redis://localhost:1"), clock=lambda: now)
    statistics.add_replica(replica)
    for step in range(60):
        now = NOW + 10 * step
        statistics._recent.observe(statistics._live_totals(), now)
        lost = 32 if step % 2 else 16
        statistics.record(record(finished_at=now, missed={"evicted": lost}, evicted_ages={step % 2: lost}))
    series = statistics.series(window_minutes=5)
    assert series.time[0] == now - now % 10 - 290
    assert series.evicted_ages == {0: [16, 0] * 15, 1: [0, 32] * 15}
    assert series.missed == {"evicted": [16, 32] * 15}


def test_a_snapshot_is_json_with_the_documented_names(
    statistics: Statistics, replica: FakeReplica, record: Record
) -> None:
    statistics.record(record())
    statistics.record(record(status="failed", prompt_tokens=20, cached_tokens=0, ttft_s=None))
    snapshot = msgspec.json.decode(msgspec.json.encode(statistics.snapshot()))
    totals = snapshot["totals"]
    assert (totals["requests"], totals["failed"]) == (2, 1)
    assert (totals["prompt_tokens"], totals["cached_prompt_tokens"]) == (120, 48)
    assert totals["token_hit_rate"] == pytest.approx(0.4)
    assert totals["saved_prefill_s"] == pytest.approx(0.125)
    assert totals["ttft_p50_s"] == pytest.approx(0.25, rel=0.26)
    for kind, name in (("templates", "support"), ("tenants", "default"), ("replicas", "engine-0")):
        assert snapshot[kind][name]["prompt_tokens"] == 120
    assert snapshot["redis"]["state"] == "starting"
