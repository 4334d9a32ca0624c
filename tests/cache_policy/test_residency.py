from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_policy.residency import ResidencyIndex

KEYS = [bytes([number]) * 16 for number in range(8)]
REPLICAS = ["engine-0", "engine-1"]


def test_a_match_ends_at_the_first_gap():
    index = ResidencyIndex()
    index.stored("a", KEYS[:5])
    index.removed("a", KEYS[2:3])
    assert index.match("a", KEYS[:5]) == 2
    index.removed("a", KEYS[:1])
    assert index.match("a", KEYS[:5]) == 0


def test_a_match_is_no_longer_than_the_prompt():
    index = ResidencyIndex()
    index.stored("a", KEYS)
    assert index.match("a", KEYS[:3]) == 3
    assert index.match("a", []) == 0


def test_replicas_hold_the_same_key_independently():
    index = ResidencyIndex()
    index.stored("a", KEYS[:2])
    index.stored("b", KEYS[:2])
    index.removed("a", KEYS[:2])
    assert (index.match("a", KEYS), index.match("b", KEYS)) == (0, 2)


def test_a_cleared_replica_holds_nothing_and_fills_again():
    index = ResidencyIndex()
    index.stored("a", KEYS)
    index.stored("b", KEYS[:1])
    index.cleared("a")
    assert index.match("a", KEYS) == 0
    assert index.size() == 1
    index.stored("a", KEYS[:3])
    assert index.match("a", KEYS) == 3


def test_events_of_an_unknown_replica_or_key_do_no_harm():
    index = ResidencyIndex()
    index.removed("a", KEYS)
    index.cleared("a")
    index.forget("a")
    index.stored("a", KEYS[:1])
    index.removed("a", KEYS)
    assert index.match("nowhere", KEYS) == 0
    assert not index.holds("nowhere")
    assert index.size() == 0


def test_holds_follows_later_events():
    index = ResidencyIndex()
    index.stored("a", KEYS[:1])
    held = index.holds("a")
    index.stored("a", KEYS[1:2])
    index.removed("a", KEYS[:1])
    assert set(held) == {KEYS[1]}
    index.cleared("a")
    assert not held


class Model(RuleBasedStateMachine):
    """Against a list of (replica, key) pairs, in any order of events."""

    def __init__(self):
        super().__init__()
        self.index = ResidencyIndex()
        self.pairs = set()

    @rule(replica=st.sampled_from(REPLICAS), keys=st.lists(st.sampled_from(KEYS)))
    def stored(self, replica, keys):
        self.index.stored(replica, keys)
        self.pairs |= {(replica, key) for key in keys}

    @rule(replica=st.sampled_from(REPLICAS), keys=st.lists(st.sampled_from(KEYS)))
    def removed(self, replica, keys):
        self.index.removed(replica, keys)
        self.pairs -= {(replica, key) for key in keys}

    @rule(replica=st.sampled_from(REPLICAS), drop=st.sampled_from(["cleared", "forget"]))
    def dropped(self, replica, drop):
        getattr(self.index, drop)(replica)
        self.pairs = {pair for pair in self.pairs if pair[0] != replica}

    @invariant()
    def holds_exactly_what_the_events_left(self):
        assert self.index.size() == len(self.pairs)  # what has gone takes no memory
        for replica in REPLICAS:
            expected = {key for holder, key in self.pairs if holder == replica}
            assert set(self.index.holds(replica)) == expected
            leading = next((count for count, key in enumerate(KEYS) if key not in expected), len(KEYS))
            assert self.index.match(replica, KEYS) == leading


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
