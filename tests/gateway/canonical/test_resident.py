from __future__ import annotations

import itertools
from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_policy.keys import chain_keys, token_bytes
from gateway.canonical.order import MAX_ORDERED, UNLIMITED, OrderLimits
from gateway.canonical.popularity import Snapshot
from gateway.canonical.resident import MAX_TRIED, ResidentPath, ResidentPaths

ROOT = b"r" * 16
BLOCK = 4


def tokens(document: int, count: int) -> list[int]:
    return [1000 * (document + 1) + position for position in range(count)]


def keys_of(head: list[int], *documents: list[int]) -> list[bytes]:
    return chain_keys(ROOT, head + [token for document in documents for token in document], BLOCK)


def search(
    head: list[int],
    documents: list[list[int] | None],
    resident: Set[bytes],
    limits: OrderLimits = UNLIMITED,
    paths: ResidentPaths | None = None,
) -> ResidentPath:
    blocks = [None if document is None else token_bytes(document) for document in documents]
    paths = paths or ResidentPaths()
    found = paths.longest(token_bytes(head), blocks, ROOT, BLOCK, resident, limits)
    led = keys_of(head, *[documents[index] or [] for index in found.documents])
    assert [*found.keys] == led[: len(found.keys)], "a request's keys are made of these"
    assert len(found.keys) * BLOCK <= found.tokens
    return ResidentPath(found.documents, found.tokens)


HEAD = list(range(10))
A, B, C = tokens(0, 9), tokens(1, 7), tokens(2, 12)


def test_nothing_leads_on_a_cold_cache() -> None:
    assert search(HEAD, [A, B, C], set()) == ResidentPath((), 0)
    assert search(HEAD, [A, B, C], set(keys_of(HEAD))) == ResidentPath((), 8)
    assert search(HEAD, [], set(keys_of(HEAD))) == ResidentPath((), 8)


def test_the_path_that_is_held_leads() -> None:
    assert search(HEAD, [A, B, C], set(keys_of(HEAD, C))) == ResidentPath((2,), 20)
    assert search(HEAD, [A, B, C], set(keys_of(HEAD, C, B))) == ResidentPath((2, 1), 28)


def test_the_path_with_most_tokens_wins_not_the_first_one() -> None:
    assert search(HEAD, [A, B, C], set(keys_of(HEAD, A) + keys_of(HEAD, B, C))).documents == (1, 2)


def test_what_lies_behind_a_gap_does_not_count() -> None:
    whole = set(keys_of(HEAD, B, C))
    paths = ResidentPaths()
    assert search(HEAD, [A, B, C], whole, paths=paths) == ResidentPath((1, 2), 28)
    for missing, expected in (
        (keys_of(HEAD, B)[2:], ResidentPath((), 8)),
        (keys_of(HEAD, B)[3:], ResidentPath((1,), 12)),
    ):
        assert search(HEAD, [A, B, C], whole.difference(missing), paths=paths) == expected


def test_a_document_cut_off_by_eviction_still_leads_with_what_is_left() -> None:
    whole = keys_of(HEAD, C)
    assert search(HEAD, [A, B, C], set(whole[:4])) == ResidentPath((2,), 16)


def test_documents_shorter_than_a_block_are_followed_through() -> None:
    short, long = tokens(3, 1), tokens(4, 8)
    assert search([], [long, short], set(keys_of([], short, long))) == ResidentPath((1, 0), 8)


def test_a_document_without_ids_of_its_own_never_leads() -> None:
    assert search(HEAD, [None, B, C], set(keys_of(HEAD, C))) == ResidentPath((2,), 20)


def test_another_root_or_block_size_shares_nothing_of_the_same_memory() -> None:
    paths = ResidentPaths()
    resident = set(keys_of(HEAD, C))
    data = (token_bytes(HEAD), [token_bytes(A), token_bytes(C)])
    assert paths.longest(*data, ROOT, BLOCK, resident) == ResidentPath((1,), 20, tuple(keys_of(HEAD, C)))
    assert paths.longest(*data, b"x" * 16, BLOCK, resident) == ResidentPath((), 0)
    assert paths.longest(*data, ROOT, 2 * BLOCK, resident) == ResidentPath((), 0)


def test_the_keys_of_what_is_resident_are_at_hand() -> None:
    paths = ResidentPaths()
    resident = set(keys_of(HEAD, C, B))
    found = paths.longest(token_bytes(HEAD), [token_bytes(B), token_bytes(C)], ROOT, BLOCK, resident)
    assert [*found.keys] == keys_of(HEAD, C, B)


def test_documents_that_share_their_first_block_are_told_apart_by_the_second() -> None:
    label = [7, 7, 7]
    one, other = label + tokens(0, 9), label + tokens(1, 9)
    head = tokens(9, 5)
    resident = set(keys_of(head, one))
    assert search(head, [other, one], resident) == ResidentPath((1,), 16)
    assert search(head, [other], resident) == ResidentPath((0,), 8)
    assert search(head, [[*label, 1], one], resident) == ResidentPath((1,), 16)


def test_limits_hold_on_the_path() -> None:
    resident = set(keys_of(HEAD, C, B) + keys_of(HEAD, A))
    assert search(HEAD, [A, B, C], resident, OrderLimits(keep_first=1)) == ResidentPath((0,), 16)
    assert search(HEAD, [A, B, C], resident, OrderLimits(max_displacement=1)) == ResidentPath((0,), 16)
    assert search(HEAD, [A, B, C], resident, OrderLimits(max_displacement=2)) == ResidentPath((2, 1), 28)


_LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(lengths=_LENGTHS, head=st.integers(0, 9), limits=st.builds(OrderLimits, st.integers(0, 2)), data=st.data())
def test_the_search_finds_the_best_of_all_permutations(
    lengths: list[int], head: int, limits: OrderLimits, data: st.DataObject
) -> None:
    documents: list[list[int]] = [tokens(index, length) for index, length in enumerate(lengths)]
    permutations = list(itertools.permutations(range(len(documents))))
    paths = ResidentPaths()
    for _ in range(2):  # the second time with what is remembered of the first
        cached = data.draw(st.lists(st.tuples(st.sampled_from(permutations), st.integers(0, 4)), max_size=4))
        resident = {
            key
            for permutation, count in cached
            for key in keys_of(list(range(head)), *(documents[index] for index in permutation[:count]))
        }

        def hit(order: tuple[int, ...], resident: Set[bytes] = frozenset(resident)) -> int:
            keys = keys_of(list(range(head)), *(documents[index] for index in order))
            return BLOCK * sum(1 for _ in itertools.takewhile(resident.__contains__, keys))

        first = tuple(range(min(limits.keep_first, len(documents))))
        found = search(list(range(head)), [*documents], resident, limits, paths)
        whole = Snapshot().order([*range(len(documents))], found.documents, limits)
        assert sorted(whole) == list(range(len(documents)))
        assert found.tokens == hit(whole) == max(hit(order) for order in permutations if order[: len(first)] == first)


def test_the_work_is_bounded_when_everything_is_resident() -> None:
    class Everything(set[bytes]):
        asked = 0

        def __contains__(self, key: object) -> bool:
            Everything.asked += 1
            return True

    documents: list[list[int] | None] = [tokens(index, 8) for index in range(MAX_ORDERED + 1)]
    found = search(HEAD, documents, Everything())
    assert found.tokens == 8 + 8 * MAX_ORDERED
    assert Everything.asked < 5 * MAX_ORDERED


def test_the_work_is_bounded_when_every_path_is_resident_but_its_end() -> None:
    documents: list[list[int] | None] = [tokens(index, 4) for index in range(12)]
    first = {keys_of([], document)[0] for document in documents if document}
    pairs = {keys_of([], one, other)[1] for one in documents for other in documents if one and other}

    class Asked(set[bytes]):
        count = 0

        def __contains__(self, key: object) -> bool:
            Asked.count += 1
            return super().__contains__(key)

    triples = {keys_of([], *three)[2] for three in itertools.permutations([d for d in documents if d], 3)}
    assert search([], documents, Asked(first | pairs | triples)).tokens == 12
    assert Asked.count <= 3 * MAX_TRIED


@pytest.mark.parametrize("heads", [1, 40])
def test_the_memory_is_bounded_whatever_is_asked(heads: int) -> None:
    paths = ResidentPaths(max_remembered=400)
    for round in range(200):
        head = tokens(round % heads + 5000, 8)
        documents = [tokens(round + offset, 12) for offset in range(3)]
        resident = set(keys_of(head, *documents))
        assert search(head, [*documents], resident, paths=paths).tokens == 44
        assert 0 < paths.remembered <= 400


def test_the_documents_that_lead_are_remembered_longest() -> None:
    paths = ResidentPaths(max_remembered=200)
    popular = tokens(0, 12)
    for other in range(1, 60):
        resident = set(keys_of(HEAD, popular)) | set(keys_of(HEAD, tokens(other, 12)))
        assert search(HEAD, [tokens(other, 12)], resident, paths=paths).tokens == 20
        assert search(HEAD, [popular], resident, paths=paths).tokens == 20
    before = paths.remembered
    search(HEAD, [popular], resident, paths=paths)
    assert paths.remembered == before, "it was hashed again"
