from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.documents import Document
from gateway.canonical.order import UNLIMITED, OrderLimits, by_id

LIMITS = st.builds(OrderLimits, st.integers(0, 4), st.integers(0, 4), st.none() | st.integers(0, 5))


def allowed(order: tuple[int, ...], limits: OrderLimits) -> bool:
    count = len(order)
    for place, index in enumerate(order):
        kept = index < limits.keep_first or index >= count - limits.keep_last
        reach = 0 if kept else limits.max_displacement
        if reach is not None and abs(place - index) > reach:
            return False
    return True


def documents(ids: str) -> list[Document]:
    return [Document(id, "", "text") for id in ids]


def test_sorting_by_id_is_deterministic_and_keeps_equal_ids_in_the_callers_order() -> None:
    given = [Document(id, "", text) for id, text in (("b", "1"), ("10", "2"), ("a", "3"), ("b", "4"))]
    assert by_id(given) == (1, 2, 0, 3)


@given(count=st.integers(1, 5), limits=LIMITS)
def test_the_choices_lead_to_every_allowed_order_and_to_no_other(count: int, limits: OrderLimits) -> None:
    def orders(placed: tuple[int, ...]) -> set[tuple[int, ...]]:
        remaining = tuple(index for index in range(count) if index not in placed)
        if not remaining:
            return {placed}
        choices = limits.choices(len(placed), remaining, count)
        assert choices, "there is always one"
        return set().union(*(orders((*placed, index)) for index in choices))

    every = itertools.permutations(range(count))
    assert orders(()) == {order for order in every if allowed(order, limits)}


@given(ids=st.text("abcd", max_size=8), limits=LIMITS)
def test_sorting_by_id_takes_the_first_that_may_stand_there(ids: str, limits: OrderLimits) -> None:
    given = documents(ids)
    expected: list[int] = []
    for place in range(len(given)):
        remaining = [index for index in range(len(given)) if index not in expected]
        choices = limits.choices(place, remaining, len(given))
        expected.append(min(choices, key=lambda index: (given[index].id, index)))
    assert by_id(given, limits) == tuple(expected)


@pytest.mark.parametrize(
    ("limits", "order"),
    [
        (UNLIMITED, "abcde"),
        (OrderLimits(keep_first=1), "eabcd"),
        (OrderLimits(keep_last=2), "cdeba"),
        (OrderLimits(max_displacement=1), "debca"),
        (OrderLimits(max_displacement=0), "edcba"),
        (OrderLimits(keep_first=9, keep_last=9), "edcba"),
    ],
)
def test_limits_hold_for_the_order_by_id(limits: OrderLimits, order: str) -> None:
    given = documents("edcba")
    assert "".join(given[index].id for index in by_id(given, limits)) == order


def test_ten_thousand_documents_are_sorted_within_limits() -> None:
    given = [Document(f"{index * 7919 % 10_000:05}", "", "text") for index in range(10_000)]
    order = by_id(given, OrderLimits(keep_first=3, keep_last=3, max_displacement=5_000))
    assert allowed(order, OrderLimits(3, 3, 5_000))
