from __future__ import annotations

import random

import pytest

from gateway.canonical.learning.evidence import MAX_MOVED_CHARS, WINDOW, DistinctSketch, FieldEvidence


def seen(*values: str) -> FieldEvidence:
    """Evidence of these values in order, weighed after each of them."""
    evidence = FieldEvidence()
    for value in values:
        evidence.add(value, digest(value))
        evidence.decide()
    return evidence


def digest(value: str) -> int:
    return random.Random(value).getrandbits(64)


def test_few_distinct_values_are_counted_exactly_and_many_within_a_fifth() -> None:
    sketch = DistinctSketch()
    for count in range(1, 10_001):
        for _ in range(2):
            sketch.add(digest(str(count)))
        if count < 32:
            assert sketch.count == count
    assert sketch.count == pytest.approx(10_000, rel=0.36)  # two standard errors


def test_merged_sketches_count_common_values_once() -> None:
    one, two = DistinctSketch(), DistinctSketch()
    for number in range(12):
        one.add(digest(str(number)))
        two.add(digest(str(number + 6)))
    assert one.merged(two).count == 18


def test_values_that_differ_make_a_field_after_eight_requests() -> None:
    assert not seen(*(f"10:00:0{second}" for second in range(7))).moving
    evidence = seen(*(f"10:00:0{second}" for second in range(8)))
    assert evidence.moving
    assert (evidence.shape, evidence.requests, evidence.distinct, evidence.changes) == ("date-time", 8, 8, 7)


def test_a_constant_is_never_one() -> None:
    assert not seen(*["2026-03-02"] * 3 * WINDOW).moving


def test_two_values_are_variants_and_so_are_a_few_names_or_words() -> None:
    assert not seen(*["07:00", "08:00"] * 50).moving
    assert not seen(*["German", "French", "Dutch"] * 50).moving
    assert not seen(*[f"be {word}" for word in ("brief", "kind", "strict", "quick")] * 50).moving
    assert seen(*[f"Ann {number}" for number in range(8)] * 2).moving


def test_what_seldom_changes_is_none() -> None:
    days = [f"2026-03-{day:02}" for day in range(1, 29) for _ in range(100)]
    assert not seen(*days).moving


def test_a_field_that_becomes_constant_stops_to_be_one_once_the_window_holds_nothing_else() -> None:
    changing = [str(number) for number in range(600)]
    assert seen(*changing, *["7"] * (WINDOW // 2)).moving
    assert not seen(*changing, *["7"] * (2 * WINDOW)).moving


def test_between_entering_and_leaving_a_field_stays_what_it_is() -> None:
    bursts = [str(number) for number in range(100) for _ in range(50)]  # a change in every 50th request
    evidence = seen(*map(str, range(16)), *bursts)
    assert evidence.moving
    assert not seen(*bursts).moving


def test_long_values_and_several_lines_are_not_moved() -> None:
    long = seen(*(f"{number} " * MAX_MOVED_CHARS for number in range(50)))
    assert (long.moving, long.bulky) == (False, True)
    lines = seen(*(f"{number}\nand more" for number in range(50)))
    assert (lines.moving, lines.bulky) == (False, True)
    assert seen(*map(str, range(60)), "x" * 1000, *map(str, range(60))).moving  # one of them changes nothing


def test_a_field_that_is_moved_ends_to_be_one_only_when_a_quarter_of_its_values_is_too_long() -> None:
    evidence = seen(*[str(number) if number % 5 or number < 60 else "x" * 1000 for number in range(3 * WINDOW)])
    assert (evidence.moving, evidence.bulky) == (True, False)
    evidence = seen(*[str(number) if number % 3 or number < 60 else "x" * 1000 for number in range(3 * WINDOW)])
    assert (evidence.moving, evidence.bulky) == (False, True)
