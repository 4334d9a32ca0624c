"""Sums: minutes, labels and windows add up to the totals; memory is bounded; nothing unwritten is lost."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stats.aggregate import Aggregate
from gateway.stats.record import RequestRecord
from gateway.stats.snapshot import group
from gateway.stats.sums import OTHER, Labels, Sums, bucket_bound, quantile
from gateway.stats.timeline import KEEP_MINUTES, MINUTE, Timeline, merge


def record(
    at: float, *, template: str = "t", tenant: str = "default", status: str = "ok", **changes: float
) -> RequestRecord:
    numbers = {"prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 7, "ttft_s": 0.2}
    numbers |= {"prefill_s": 0.1, "saved_prefill_s": 0.05} | changes
    return RequestRecord(finished_at=at, tenant=tenant, template=template, replica="engine-0", status=status, **numbers)


def random_records(seed: int, count: int, span: float) -> list[RequestRecord]:
    rng = random.Random(seed)
    return [
        record(
            1_700_000_000 + rng.random() * span,
            template=rng.choice("abc"),
            tenant=rng.choice("xy"),
            status=rng.choice(("ok", "ok", "failed", "aborted")),
            prompt_tokens=rng.randrange(1, 2000),
            cached_tokens=0,
        )
        for _ in range(count)
    ]


def test_every_grouping_adds_up_to_the_total() -> None:
    aggregate = Aggregate()
    records = random_records(1, 300, 3000)
    for item in records:
        aggregate.record(item)
    prompt_tokens = sum(item.prompt_tokens for item in records)
    for by in ("template", "tenant", "replica"):
        total = Sums.of(group(aggregate.totals, by).values())
        assert (total.requests, total.prompt_tokens) == (300, prompt_tokens)
    minutes = Sums.of(sums for _, row in aggregate.timelines[MINUTE] for sums in row.values())
    assert msgspec.structs.replace(minutes, prefill_s=0, saved_prefill_s=0, ttft_s=0) == msgspec.structs.replace(
        Sums.of(aggregate.totals.values()), prefill_s=0, saved_prefill_s=0, ttft_s=0
    )


@given(st.data())
def test_windows_equal_the_plain_sum_of_their_minutes_whatever_was_changed_between(data: st.DataObject) -> None:
    timeline = Timeline(MINUTE)
    plain: dict[tuple[int, Labels], int] = {}
    labels = [Labels(name, "x", "r") for name in "ab"]
    for _ in range(data.draw(st.integers(1, 30))):
        minute, label = data.draw(st.integers(0, 45)), data.draw(st.sampled_from(labels))
        if data.draw(st.booleans()):
            timeline.cell(minute, label).requests += 1
            plain[minute, label] = plain.get((minute, label), 0) + 1
        else:
            timeline.replace(minute, {label: Sums(requests=5)})
            plain = {key: value for key, value in plain.items() if key[0] != minute} | {(minute, label): 5}
        last, length = data.draw(st.integers(0, 50)), data.draw(st.integers(1, 50))
        inside = {key: value for key, value in plain.items() if last - length < key[0] <= last}
        window = timeline.window(last, length)
        assert {label: sums.requests for label, sums in window.items()} == {
            label: sum(value for key, value in inside.items() if key[1] == label)
            for label in {key[1] for key in inside}
        }
        assert timeline.total(last, length).requests == sum(inside.values())


def test_only_the_last_day_of_minutes_is_kept() -> None:
    aggregate = Aggregate()
    for minute in range(KEEP_MINUTES + 500):
        aggregate.record(record(minute * 60.0))
    assert len(dict(aggregate.timelines[MINUTE])) <= KEEP_MINUTES + 1
    assert len(aggregate.take_changes().rows[MINUTE]) <= KEEP_MINUTES + 1
    assert Sums.of(aggregate.totals.values()).requests == KEEP_MINUTES + 500


def test_labels_beyond_the_bound_are_counted_as_other_and_never_move() -> None:
    aggregate = Aggregate(max_series=3)
    for name in ("a", "b", "c", "d", "e", "a"):
        aggregate.record(record(0.0, template=name, tenant=f"tenant-{name}"))
    for label in ("template", "tenant"):
        counts = {name.removeprefix("tenant-"): sums.requests for name, sums in group(aggregate.totals, label).items()}
        assert counts == {"a": 2, "b": 1, "c": 1, OTHER: 2}


def test_a_tenant_with_ever_new_templates_takes_no_other_ones_labels() -> None:
    """A learned template is a name that a tenant's own requests made."""
    aggregate = Aggregate(max_series=8)
    for number in range(100):
        aggregate.record(record(0.0, template=f"learned-{number}", tenant="loud"))
    for name in ("a", "b"):
        aggregate.record(record(0.0, template=name, tenant="quiet"))
    assert {name: sums.requests for name, sums in group(aggregate.totals, "tenant").items()} == {
        "loud": 100,
        "quiet": 2,
    }
    templates = group(aggregate.totals, "template")
    assert (templates["a"].requests, templates["b"].requests, templates[OTHER].requests) == (1, 1, 96)


def test_replicas_that_come_and_go_for_ever_do_not_add_up_in_memory() -> None:
    aggregate = Aggregate(max_series=3)
    for number in range(50):
        passing = msgspec.structs.replace(record(0.0), replica=f"replica-{number}", model="m")
        aggregate.record(passing)
        aggregate.add_engine(passing.replica, 0.0, evictions=1, preemptions=0)
    assert len(aggregate.totals) <= 2 * 3 + 2
    total = Sums.of(aggregate.totals.values())
    assert (total.requests, total.evictions) == (50, 50)
    assert all(len(row) <= 2 * 3 + 2 for _, row in aggregate.timelines[MINUTE])


def test_tables_show_the_largest_labels_and_sum_up_the_rest() -> None:
    table = {Labels(f"t{i}", "x", "r"): Sums(requests=i) for i in range(60)}
    shown = group(table, "template")
    assert len(shown) == 51
    assert next(iter(shown)) == "t59"
    assert shown[OTHER].requests == sum(range(10))


def test_changes_are_absolute_and_come_back_when_writing_failed() -> None:
    aggregate = Aggregate()
    aggregate.record(record(60.0))
    failed = aggregate.take_changes()
    assert not aggregate.take_changes()
    aggregate.record(record(61.0))
    aggregate.restore(failed)
    (value,) = aggregate.take_changes().totals.values()
    assert msgspec.json.decode(value, type=Sums).requests == 2
    aggregate.restore_all()
    again = aggregate.take_changes()
    assert list(again.totals.values()) == [value]
    assert list(again.rows[MINUTE]) == [1]


def test_sums_survive_their_encoding() -> None:
    sums = Sums()
    sums.count(record(0.0))
    assert msgspec.json.decode(msgspec.json.encode(sums), type=Sums) == sums


@pytest.mark.parametrize("q", [0.5, 0.95])
def test_quantiles_are_within_a_bucket_of_the_exact_ones(q: float) -> None:
    rng = random.Random(3)
    values = sorted(rng.lognormvariate(-1.0, 1.2) for _ in range(5000))
    sums = Sums()
    for value in values:
        sums.count(record(0.0, ttft_s=value))
    assert quantile(sums.ttft, q) == pytest.approx(values[int(q * len(values))], rel=0.26)


def test_quantiles_of_nothing_and_of_extremes() -> None:
    assert quantile({}, 0.5) is None
    sums = Sums()
    for value in (0.0, 1e9):
        sums.count(record(0.0, ttft_s=value))
    low, high = quantile(sums.ttft, 0.25), quantile(sums.ttft, 1.0)
    assert low is not None
    assert 0.0 <= low <= bucket_bound(0)
    assert high == pytest.approx(262.144)


def test_since_is_the_inverse_of_add_and_never_negative() -> None:
    first, second = Sums(), Sums()
    first.count(record(0.0))
    second.count(record(0.0, ttft_s=5.0))
    both = Sums.of((first, second))
    later = both.since(first)
    assert (later.requests, later.ttft) == (1, second.ttft)
    assert first.since(both) == Sums()


def test_merge_does_not_touch_its_parts() -> None:
    labels = Labels("a", "x", "r")
    part = {labels: Sums(requests=1)}
    merged = merge((part, part))
    assert merged[labels].requests == 2
    assert part[labels].requests == 1
