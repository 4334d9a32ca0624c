from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.batch_order import BatchRequest, batch_orders
from gateway.canonical.order import MAX_ORDERED


def batch(*requests: str, group: str = "g", tokens: int = 100) -> list[BatchRequest]:
    return [BatchRequest(group, tuple(documents), (tokens,) * len(documents)) for documents in requests]


def arranged(requests: list[BatchRequest]) -> list[str]:
    orders = batch_orders(requests)
    return ["".join(str(r.documents[index]) for index in order) for r, order in zip(requests, orders, strict=True)]


def saved(prompts: list[str]) -> int:
    """Documents that an endless cache would have of prompts that are sent one after the other."""
    seen: set[str] = set()
    count = 0
    for prompt in prompts:
        prefixes = {*itertools.accumulate(prompt)}
        count += len(prefixes & seen)
        seen |= prefixes
    return count


def test_what_most_requests_share_comes_first() -> None:
    assert arranged(batch("abc", "dba", "eb", "ce")) == ["bac", "bad", "be", "ce"]


def test_of_two_documents_that_as_many_share_the_longer_comes_first() -> None:
    requests = [BatchRequest("g", ("short", "long"), (10, 20))] * 2
    assert batch_orders(requests) == [(1, 0), (1, 0)]


def test_groups_share_nothing() -> None:
    assert arranged([*batch("ab", group="one"), *batch("ba", group="other")]) == ["ab", "ba"]


def test_nothing_to_share_keeps_the_callers_order() -> None:
    assert batch_orders([]) == []
    assert arranged(batch("cba", "", "fed")) == ["cba", "", "fed"]


def test_documents_behind_the_bound_keep_their_places() -> None:
    documents = tuple(range(MAX_ORDERED + 5))
    request = BatchRequest("g", documents, (1,) * len(documents))
    turned = BatchRequest("g", documents[::-1], (1,) * len(documents))
    for order in batch_orders([request, turned]):
        assert order[MAX_ORDERED:] == tuple(range(MAX_ORDERED, len(documents)))


_REQUESTS = st.lists(st.lists(st.sampled_from("abcdef"), unique=True).map("".join), max_size=8)


@given(documents=_REQUESTS)
def test_every_document_stays_and_equal_sets_get_one_order(documents: list[str]) -> None:
    requests = batch(*documents)
    prompts = arranged(requests)
    assert prompts == arranged(requests)
    assert [sorted(prompt) for prompt in prompts] == [sorted(given) for given in documents]
    assert len(set(prompts)) == len({frozenset(given) for given in documents})


@given(documents=st.lists(st.permutations("abc").map(lambda drawn: "".join(drawn[:2])), min_size=1, max_size=5))
def test_pairs_of_documents_are_shared_at_least_as_well_as_sorted_by_frequency(documents: list[str]) -> None:
    counts = {name: sum(name in given for given in documents) for name in "abc"}
    by_frequency = ["".join(sorted(given, key=lambda name: (-counts[name], name))) for given in documents]
    assert saved(arranged(batch(*documents))) >= saved(by_frequency)
