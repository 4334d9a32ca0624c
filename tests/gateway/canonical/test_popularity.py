from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.order import MAX_ORDERED, OrderLimits
from gateway.canonical.popularity import MAX_DOCUMENTS, MAX_PAIRS, Popularity, Snapshot
from gateway.canonical.sighting import Scope, Sighting

SCOPE = Scope("acme", "support")


def seen(popularity: Popularity, times: int, *documents: int, scope: Scope = SCOPE) -> None:
    for _ in range(times):
        popularity.observe(Sighting(scope, documents))


def test_an_unknown_scope_keeps_the_callers_order() -> None:
    snapshot = Popularity().snapshot(SCOPE)
    assert snapshot.version == 0
    assert snapshot.order([30, 10, 20]) == (0, 1, 2)
    assert snapshot.order([30, 10, 20], led=(2,)) == (2, 0, 1)
    assert snapshot.order([30, 10, 20], ranks=[2, 0, 1]) == (1, 2, 0)


def test_what_is_asked_for_most_comes_first_and_then_what_goes_with_it() -> None:
    popularity = Popularity()
    seen(popularity, 12, 1, 2)
    seen(popularity, 11, 3)
    seen(popularity, 9, 1, 4)
    snapshot = popularity.snapshot(SCOPE)
    assert snapshot.version == 1
    assert snapshot.order([4, 3, 2, 1]) == (3, 2, 1, 0)  # 1 (21 times), 2 with it (12), 3 (never with 2, 11), 4
    assert snapshot.order([3, 2, 4], led=(2,)) == (2, 1, 0)


def test_what_goes_with_the_documents_that_a_replica_holds_follows_them() -> None:
    popularity = Popularity()
    seen(popularity, 20, 1)
    seen(popularity, 12, 2, 3)
    snapshot = popularity.snapshot(SCOPE)
    assert snapshot.order([1, 2, 3]) == (0, 1, 2)
    assert snapshot.order([1, 2, 3], led=(1,)) == (1, 2, 0)


def test_unknown_documents_stay_in_the_callers_order_behind_the_known() -> None:
    popularity = Popularity()
    seen(popularity, 32, 7)
    assert popularity.snapshot(SCOPE).order([9, 8, 7, 6]) == (2, 0, 1, 3)


def test_a_snapshot_stays_as_it_is_until_the_next_version() -> None:
    popularity = Popularity()
    seen(popularity, 32, 1)
    first = popularity.snapshot(SCOPE)
    seen(popularity, 63, 2)
    assert popularity.snapshot(SCOPE) is first
    assert first.order([2, 1]) == (1, 0)
    seen(popularity, 1, 2)
    second = popularity.snapshot(SCOPE)
    assert (first.version, second.version) == (1, 2)
    assert second.order([1, 2]) == (1, 0)
    assert first.order([2, 1]) == (1, 0)


def test_what_is_no_longer_asked_for_is_forgotten() -> None:
    popularity = Popularity()
    seen(popularity, 32, 1)
    seen(popularity, 64 + 128, 2)
    assert popularity.snapshot(SCOPE).order([3, 1]) == (0, 1)


def test_scopes_know_nothing_of_each_other() -> None:
    popularity = Popularity()
    seen(popularity, 32, 1)
    for other in (Scope("other", "support"), Scope("acme", "other"), Scope("acme", "support", "salt")):
        assert popularity.snapshot(other).version == 0


@given(ranks=st.permutations(range(4)), order=st.permutations(range(4)), seed=st.integers(0, 9))
def test_with_ranks_of_their_own_the_order_does_not_depend_on_the_callers(
    ranks: list[int], order: list[int], seed: int
) -> None:
    popularity = Popularity()
    chance = random.Random(seed)
    for _ in range(32):
        popularity.observe(Sighting(SCOPE, tuple(chance.sample([10, 11, 12, 13], chance.randint(1, 4)))))
    snapshot = popularity.snapshot(SCOPE)
    documents = [10, 11, 12, 13]
    expected = [documents[index] for index in snapshot.order(documents, ranks=ranks)]
    given = [documents[index] for index in order]
    assert [given[index] for index in snapshot.order(given, ranks=[ranks[index] for index in order])] == expected


@given(
    count=st.integers(1, MAX_ORDERED + 3),
    limits=st.builds(OrderLimits, st.integers(0, 3), st.integers(0, 3), st.none() | st.integers(0, 5)),
    known=st.integers(0, 3),
)
def test_every_order_is_a_permutation_within_its_limits(count: int, limits: OrderLimits, known: int) -> None:
    popularity = Popularity()
    chance = random.Random(known)
    for _ in range(32 * known):
        popularity.observe(Sighting(SCOPE, tuple(chance.sample(range(count), min(count, 8)))))
    order = popularity.snapshot(SCOPE).order(range(count), limits=limits)
    assert sorted(order) == list(range(count))
    assert order[: min(limits.keep_first, count)] == tuple(range(min(limits.keep_first, count)))
    assert order[max(0, count - limits.keep_last) :] == tuple(range(max(0, count - limits.keep_last), count))
    if limits.max_displacement is not None:
        assert all(abs(place - index) <= limits.max_displacement for place, index in enumerate(order))


def test_what_is_kept_is_bounded_and_counted() -> None:
    popularity = Popularity(max_documents=300, max_pairs=600, max_scopes=4)
    chance = random.Random(1)
    for request in range(3000):
        scope = Scope(f"tenant-{chance.choice((0, 0, 0, 0, 1, 1, 2, 3, 4))}", "support")
        popularity.observe(Sighting(scope, tuple(chance.sample(range(request, request + 500), chance.randint(1, 16)))))
        assert 0 < popularity.documents <= 300
        assert 0 <= popularity.pairs <= 600
    versions = [popularity.snapshot(Scope(f"tenant-{number}", "support")).version for number in range(5)]
    assert versions[0] > 0
    assert versions.count(0) >= 1, "five scopes were one too many"


def test_a_flood_of_documents_drives_out_none_but_its_own() -> None:
    popularity = Popularity(max_documents=300, max_pairs=600)
    seen(popularity, 40, 1, 2)
    known = popularity.snapshot(SCOPE)
    flood = Scope("hostile", "support")
    for request in range(2000):
        popularity.observe(Sighting(flood, tuple(range(16 * request, 16 * request + 16))))
    assert popularity.snapshot(SCOPE) is known
    assert popularity.documents <= 300


def test_a_tenant_with_ever_new_salts_drives_out_no_other_ones_scopes() -> None:
    popularity = Popularity(max_scopes=8)
    for number in range(40):
        seen(popularity, 1, 1, 2, scope=Scope("quiet", "support"))
        for salt in range(20):
            seen(popularity, 1, 3, 4, scope=Scope("loud", "support", f"{number} {salt}"))
    assert popularity.snapshot(Scope("quiet", "support")).version == 1


def test_100_000_documents_are_known_however_many_pairs_they_make() -> None:
    popularity = Popularity()
    chance = random.Random(2)
    corpus = [chance.getrandbits(64) for _ in range(MAX_DOCUMENTS // 3)]
    assert len(corpus) == 100_000
    for _ in range(2):
        for start in range(0, len(corpus), 20):
            popularity.observe(Sighting(SCOPE, tuple(corpus[start : start + 20])))
    assert all(popularity.snapshot(SCOPE).asked(corpus))
    assert popularity.documents <= MAX_DOCUMENTS
    assert popularity.pairs <= MAX_PAIRS


def test_of_many_documents_those_that_come_again_are_still_paired() -> None:
    popularity = Popularity()
    seen(popularity, 1, *range(100, 20_100))
    first = popularity.pairs
    for round in range(40):
        seen(popularity, 1, 1, *range(-4 * round - 4, -4 * round), 2 + round % 2)
    snapshot = popularity.snapshot(SCOPE)
    assert snapshot.order([3, -1, 2, 1], led=(2,)) == (2, 3, 0, 1)
    assert popularity.pairs <= first + 2 * 2, "pairs of what never comes again are counted"


@pytest.mark.parametrize("size", [1, 10_000])
def test_one_request_with_more_than_fits_is_no_harm(size: int) -> None:
    popularity = Popularity(max_documents=100, max_pairs=100)
    seen(popularity, 3, *range(size))
    assert popularity.documents <= 100
    assert popularity.snapshot(SCOPE).order(range(size), led=(0,))[0] == 0


def test_snapshots_are_values() -> None:
    assert Snapshot() == Snapshot()
