from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_policy.keys import chain_keys, token_bytes
from gateway.canonical.documents import Document
from gateway.canonical.order import MAX_NODES, ResidentOrder, by_id, longest_resident_path

ROOT = b"r" * 16
BLOCK = 4


def tokens(document: int, count: int) -> list[int]:
    return [1000 * (document + 1) + position for position in range(count)]


def keys_of(head: list[int], *documents: list[int]) -> list[bytes]:
    return chain_keys(ROOT, head + [token for document in documents for token in document], BLOCK)


def search(head: list[int], documents: list[list[int] | None], resident: set[bytes]) -> ResidentOrder:
    blocks = [None if document is None else token_bytes(document) for document in documents]
    return longest_resident_path(token_bytes(head), blocks, ROOT, BLOCK, resident)


HEAD = list(range(10))
A, B, C = tokens(0, 9), tokens(1, 7), tokens(2, 12)


def test_a_cold_cache_leaves_the_callers_order() -> None:
    assert search(HEAD, [A, B, C], set()) == ResidentOrder((0, 1, 2), 0, 0)
    assert search(HEAD, [A, B, C], set(keys_of(HEAD))) == ResidentOrder((0, 1, 2), 0, 8)


def test_the_cached_path_leads_and_the_rest_keeps_the_callers_order() -> None:
    assert search(HEAD, [A, B, C], set(keys_of(HEAD, C))) == ResidentOrder((2, 0, 1), 1, 20)
    assert search(HEAD, [A, B, C], set(keys_of(HEAD, C, B))) == ResidentOrder((2, 1, 0), 2, 28)


def test_the_path_with_most_tokens_wins_not_the_first_one() -> None:
    assert search(HEAD, [A, B, C], set(keys_of(HEAD, A) + keys_of(HEAD, B, C))).order == (1, 2, 0)


def test_what_lies_behind_a_gap_does_not_count() -> None:
    resident = set(keys_of(HEAD, B, C)) - {keys_of(HEAD, B)[3]}
    assert search(HEAD, [A, B, C], resident) == ResidentOrder((1, 0, 2), 1, 12)


def test_a_document_cut_off_by_eviction_still_leads_with_what_is_left() -> None:
    whole = keys_of(HEAD, C)
    assert search(HEAD, [A, B, C], set(whole[:4])) == ResidentOrder((2, 0, 1), 1, 16)


def test_documents_shorter_than_a_block_are_followed_through() -> None:
    short, long = tokens(3, 1), tokens(4, 8)
    assert search([], [long, short], set(keys_of([], short, long))) == ResidentOrder((1, 0), 2, 8)


def test_a_document_without_ids_of_its_own_never_leads() -> None:
    assert search(HEAD, [None, B, C], set(keys_of(HEAD, C))) == ResidentOrder((2, 0, 1), 1, 20)


def test_another_root_shares_nothing() -> None:
    blocks = [token_bytes(document) for document in (A, C)]
    found = longest_resident_path(token_bytes(HEAD), blocks, b"x" * 16, BLOCK, set(keys_of(HEAD, C)))
    assert found == ResidentOrder((0, 1), 0, 0)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    head=st.integers(0, 9),
    data=st.data(),
)
def test_the_search_finds_the_best_of_all_permutations(lengths: list[int], head: int, data: st.DataObject) -> None:
    documents: list[list[int]] = [tokens(index, length) for index, length in enumerate(lengths)]
    permutations = list(itertools.permutations(range(len(documents))))
    cached = data.draw(st.lists(st.tuples(st.sampled_from(permutations), st.integers(0, 4)), max_size=4))
    resident = {
        key
        for permutation, count in cached
        for key in keys_of(list(range(head)), *(documents[index] for index in permutation[:count]))
    }

    def hit(order: tuple[int, ...]) -> int:
        keys = keys_of(list(range(head)), *(documents[index] for index in order))
        return BLOCK * sum(1 for _ in itertools.takewhile(resident.__contains__, keys))

    found = search(list(range(head)), [*documents], resident)
    assert sorted(found.order) == list(range(len(documents)))
    assert found.resident_tokens == hit(found.order) == max(map(hit, permutations))


def test_the_work_is_bounded_when_everything_is_resident() -> None:
    class Everything(set[bytes]):
        asked = 0

        def __contains__(self, key: object) -> bool:
            Everything.asked += 1
            return True

    documents: list[list[int] | None] = [tokens(index, 8) for index in range(100)]
    found = search(HEAD, documents, Everything())
    assert found.resident_tokens == 808
    assert Everything.asked <= 2 * MAX_NODES + 10


def test_sorting_by_id_is_deterministic_and_keeps_equal_ids_in_the_callers_order() -> None:
    documents = [Document(id, "", text) for id, text in (("b", "1"), ("10", "2"), ("a", "3"), ("b", "4"))]
    assert by_id(documents) == (1, 2, 0, 3)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_question_gets_the_same_order_whatever_the_order_of_the_set(seed: int) -> None:
    keys = keys_of(HEAD, C, A) + keys_of(HEAD, B)
    random.Random(seed).shuffle(keys)
    assert search(HEAD, [A, B, C], set(keys)).order == (2, 0, 1)
