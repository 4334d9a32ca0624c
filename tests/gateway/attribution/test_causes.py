"""Every missed token gets one cause: nothing is counted twice and nothing is left over."""

from __future__ import annotations

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.attribution.causes import CAUSES, CauseTable, Example, Loss, Occurrence, Sighting, attribute
from gateway.attribution.history import Cause, Verdict


def verdict(cause: str) -> Verdict:
    return Verdict(cause, 0, None)  # type: ignore[arg-type]


def lost(sighting: Sighting, *causes: str) -> dict[str, int]:
    return {loss.cause: loss.tokens for loss in attribute(sighting, [verdict(cause) for cause in causes])}


def test_the_causes_are_those_of_the_design() -> None:
    assert set(CAUSES) == {
        "never_seen",
        "evicted",
        "other_replica",
        "volatile",
        "document_order",
        "tool_order",
        "text_form",
        "namespace",
        "block_rounding",
        "below_minimum",
        "bypass",
    }


@st.composite
def sightings(draw: st.DrawFn) -> tuple[Sighting, list[Verdict]]:
    size = draw(st.sampled_from([1, 4, 16]))
    length = draw(st.integers(0, 200))
    full = length // size
    remembered = draw(st.integers(0, full)) * size
    ends = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    causes = [verdict(draw(st.sampled_from(get_args(Cause)))) for _ in ends]
    return (
        Sighting(
            length=length,
            cached=draw(st.integers(0, full)) * size,
            remembered=remembered,
            common=draw(st.integers(0, length)),
            ends=ends,
            elsewhere=draw(st.integers(0, full)) * size,
            block_size=size,
            bypass=draw(st.booleans()),
        ),
        causes,
    )


@settings(deadline=None)
@given(sightings())
def test_the_causes_add_up_to_what_was_missed(case: tuple[Sighting, list[Verdict]]) -> None:
    sighting, verdicts = case
    losses = attribute(sighting, verdicts)
    assert sum(loss.tokens for loss in losses) == sighting.length - sighting.cached
    assert all(loss.tokens > 0 for loss in losses)
    assert all(sighting.cached <= loss.token < sighting.length for loss in losses)
    assert len({loss.cause for loss in losses}) == len(losses)


def test_the_road_of_one_prompt() -> None:
    sighting = Sighting(length=100, cached=16, remembered=32, common=37, ends=(40, 50, 90, 100), elsewhere=20)
    assert lost(sighting, "evicted", "never_seen", "volatile", "never_seen") == {
        "other_replica": 4,
        "evicted": 12,
        "block_rounding": 5,
        "never_seen": 3 + 10 + 10,  # the rest of a part that was there before goes with what follows it
        "volatile": 40,
    }


def test_a_known_part_beyond_what_is_remembered_was_evicted() -> None:
    sighting = Sighting(length=64, cached=0, remembered=0, common=0, ends=(32, 64))
    assert lost(sighting, "evicted", "volatile") == {"evicted": 32, "volatile": 32}


def test_a_prompt_shorter_than_a_block_and_one_that_bypasses_have_one_cause() -> None:
    assert lost(Sighting(length=15, cached=0, remembered=0, common=9, ends=(15,)), "volatile") == {"below_minimum": 15}
    bypass = Sighting(length=100, cached=0, remembered=0, common=0, ends=(), bypass=True)
    assert lost(bypass) == {"bypass": 100}


def test_a_loss_points_to_its_longest_run() -> None:
    sighting = Sighting(length=100, cached=0, remembered=0, common=0, ends=(10, 30, 40, 100))
    losses = attribute(sighting, [verdict(cause) for cause in ("never_seen", "volatile", "volatile", "never_seen")])
    assert losses == [Loss("never_seen", 70, 40, 3), Loss("volatile", 30, 10, 1)]


def occurrence(serial: int, cause: str, tokens: int) -> Occurrence:
    return Occurrence(serial, Loss(cause, tokens, 0, 0), None, None)  # type: ignore[arg-type]


def test_rows_are_sorted_by_cause_and_keep_the_dearest_request() -> None:
    table = CauseTable()
    table.add("a", [occurrence(1, "volatile", 10), occurrence(1, "never_seen", 25)])
    table.add("b", [occurrence(2, "volatile", 30)])
    table.add("b", [occurrence(3, "volatile", 40)])
    table.add("a", [occurrence(4, "volatile", 10)])
    rows = table.rows(lambda kept: Example(kept.serial, "", "", ""))
    assert [(row.cause, row.template, row.requests, row.tokens) for row in rows] == [
        ("volatile", "b", 2, 70),
        ("volatile", "a", 2, 20),
        ("never_seen", "a", 1, 25),
    ]
    assert [row.example.token for row in rows if row.example] == [3, 1, 1]


def test_the_number_of_rows_is_bounded_and_nothing_is_lost() -> None:
    table = CauseTable(max_rows=3)
    for serial in range(20):
        table.add(f"template {serial}", [occurrence(serial, "volatile", 5)])
    rows = table.rows(lambda kept: None)
    assert len(rows) == 4
    assert sum(row.tokens for row in rows) == 100
    assert rows[0].template == "others"
