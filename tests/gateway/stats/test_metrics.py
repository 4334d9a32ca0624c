"""The Prometheus exposition equals what was counted, under the documented names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from engine.wire import EngineInfo, Load, StepTiming
from gateway.config import RedisConfig
from gateway.replicas.base import ReplicaState
from gateway.stats.metrics import Exposition
from gateway.stats.statistics import Statistics

Record = Callable[..., Any]


class FakeReplica:
    id = "engine-0"
    state = ReplicaState.READY
    down_reason = None
    info = EngineInfo("m", "/nowhere", "f", "boot", 512, 64, 16, "float32", "cpu", 1000, (2,), "lru", 256)
    load = Load(1, 2, 40, 10, 20, 34, 7, 3, 0, 5)


def scrape(statistics: Statistics) -> dict[str, list[tuple[dict[str, str], float]]]:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(Exposition(statistics).render().decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def total(samples: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    return sum(value for _, value in samples[name])


def test_summed_over_labels_every_counter_equals_the_records(record: Record) -> None:
    statistics = Statistics(RedisConfig(url="redis://localhost:1"))
    records = [
        record(template=f"t{i % 3}", tenant=f"x{i % 2}", prompt_tokens=i + 1, cached_tokens=i // 2, ttft_s=0.01 * i)
        for i in range(40)
    ]
    records.append(record(status="failed", ttft_s=None))
    for item in records:
        statistics.record(item)
    samples = scrape(statistics)
    assert total(samples, "headstart_prompt_tokens_total") == sum(item.prompt_tokens for item in records)
    assert total(samples, "headstart_cached_prompt_tokens_total") == sum(item.cached_tokens for item in records)
    assert total(samples, "headstart_completion_tokens_total") == sum(item.completion_tokens for item in records)
    assert total(samples, "headstart_requests_total") == 41
    assert sum(value for labels, value in samples["headstart_requests_total"] if labels["status"] == "failed") == 1
    assert total(samples, "headstart_saved_prefill_seconds_total") == 41 * 0.0625
    assert total(samples, "headstart_prefill_seconds_total") == 41 * 0.125
    totals = statistics.snapshot().totals
    assert total(samples, "headstart_prompt_tokens_total") == totals.prompt_tokens


def test_the_ttft_histogram_is_cumulative_and_counts_first_tokens_only(record: Record) -> None:
    statistics = Statistics(RedisConfig(url="redis://localhost:1"))
    for ttft in (0.001, 0.0015, 0.1, 3.0, 1000.0):
        statistics.record(record(ttft_s=ttft))
    statistics.record(record(ttft_s=None))
    samples = scrape(statistics)
    buckets = {float(labels["le"]): value for labels, value in samples["headstart_ttft_seconds_bucket"]}
    assert list(buckets.values()) == sorted(buckets.values())
    assert (buckets[0.001], buckets[0.002], buckets[0.128], buckets[4.096], buckets[float("inf")]) == (1, 2, 3, 4, 5)
    assert total(samples, "headstart_ttft_seconds_count") == 5
    assert total(samples, "headstart_ttft_seconds_sum") == 0.001 + 0.0015 + 0.1 + 3.0 + 1000.0


def test_pool_and_engine_counters_are_labelled_by_replica(record: Record) -> None:
    replica: Any = FakeReplica()
    statistics = Statistics(RedisConfig(url="redis://localhost:1"))
    statistics.add_replica(replica)
    assert total(scrape(statistics), "headstart_evictions_total") == 0
    statistics.on_ready(replica, replica.info)
    statistics.on_step(replica, StepTiming(0, 0, 1, 10, 0.1), replica.load)
    samples = scrape(statistics)
    states = {labels["state"]: value for labels, value in samples["headstart_kv_blocks"]}
    assert states == {"used": 10, "cached": 20, "free": 34}
    assert samples["headstart_evictions_total"] == [({"replica": "engine-0"}, 7)]
    assert samples["headstart_preemptions_total"] == [({"replica": "engine-0"}, 3)]
    assert samples["headstart_replica_up"] == [({"replica": "engine-0"}, 1)]
    assert (total(samples, "headstart_requests_running"), total(samples, "headstart_requests_waiting")) == (1, 2)


def test_labels_need_no_escaping_by_hand(record: Record) -> None:
    statistics = Statistics(RedisConfig(url="redis://localhost:1"))
    name = 'a "quoted" \\ name\nwith a break'
    statistics.record(record(template=name))
    assert scrape(statistics)["headstart_prompt_tokens_total"][0][0]["template"] == name


def test_series_stay_bounded_whatever_labels_arrive(record: Record) -> None:
    statistics = Statistics(RedisConfig(url="redis://localhost:1"))
    for i in range(2000):
        statistics.record(record(template=f"t{i}"))
    samples = scrape(statistics)
    assert len(samples["headstart_prompt_tokens_total"]) <= 513
    assert total(samples, "headstart_prompt_tokens_total") == 200_000
