"""The index that follows an engine's KV events, over a channel that loses, repeats and reorders them."""

from __future__ import annotations

import random

import msgspec
import pytest

from cache_policy.keys import chain_keys
from cache_policy.residency import ResidencyIndex
from cache_policy.vllm_keys import VllmHash
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from gateway.replicas.kv_events import KvEvents

from .kv_publisher import Publisher

ROOTS = [bytes([number]) * 16 for number in range(3)]
TOPIC = b"kv-events"


class Follower:
    """An index behind ``KvEvents``, and the channel from the publisher."""

    def __init__(self, publisher: Publisher, *, capacity: int = 1000) -> None:
        self.publisher = publisher
        self.index = ResidencyIndex()
        self.events = KvEvents(capacity, self.hear)

    def hear(self, events: tuple[CacheEvent, ...]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self.index.stored("r", event.block_hashes)
                case BlockRemoved():
                    self.index.removed("r", event.block_hashes)
                case AllBlocksCleared():
                    self.index.cleared("r")

    @property
    def held(self) -> set[bytes]:
        return set(self.index.holds("r"))

    def live(self, message: tuple[int, bytes] | None) -> None:
        """A published message arrives."""
        if message is not None:
            self.events.receive([TOPIC, message[0].to_bytes(8, "big"), message[1]])

    def replay(self) -> None:
        """Answer what is wanted, as vLLM does."""
        sequence = self.events.sequence
        while sequence.wanted is not None:
            start = sequence.wanted
            sequence.begin_replay()
            for number, payload in [*self.publisher.log]:
                if number >= start:
                    assert self.events.replay([b"", TOPIC, number.to_bytes(8, "big"), payload])
            assert not self.events.replay([b"", b"", (-1).to_bytes(8, "big", signed=True), b""])
            sequence.end_replay()

    def settle(self) -> None:
        """It has been quiet for a while."""
        self.events.sequence.check()
        self.replay()


def prompt(rng: random.Random, documents: list[list[int]]) -> tuple[bytes, list[int]]:
    """A namespace and a prompt of a shared beginning, documents, and a question."""
    tokens = list(range(8))
    for _ in range(rng.randint(0, 3)):
        tokens += documents[min(int(rng.expovariate(0.3)), len(documents) - 1)]
    return rng.choice(ROOTS), tokens + [rng.randrange(1000) for _ in range(rng.randint(1, 9))]


def documents(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(1000) for _ in range(rng.randint(4, 20))] for _ in range(12)]


@pytest.mark.parametrize("seed", range(3))
def test_the_index_equals_the_truth_after_losses_repeats_reordering_and_restarts(seed: int) -> None:
    """10^5 messages in all three seeds; 1 % each are lost, repeated or late; 20 restarts each."""
    rng = random.Random(seed)
    publisher, corpus = Publisher(rng), documents(rng)
    follower = Follower(publisher)
    count = 33_400
    restarts = set(rng.sample(range(count), 20))
    late: list[tuple[int, bytes]] = []
    for step in range(count):
        if step in restarts:
            publisher.restart()
            late.clear()  # its connections died with it
        if rng.random() < 0.0002:
            message: tuple[int, bytes] | None = publisher.clear()
        else:
            root, tokens = prompt(rng, corpus)
            message = publisher.compute(root, tokens) or publisher.publish()
        fate = rng.random()
        if fate < 0.01:
            continue
        if fate < 0.02:
            late.append(message)
            continue
        follower.live(message)
        if fate < 0.03:
            follower.live(message)
        if late and rng.random() < 0.3:
            follower.live(late.pop(rng.randrange(len(late))))
        if rng.random() < 0.5:  # answers to replays take their time
            follower.replay()
        if step % 1000 == 999:
            for message in late:
                follower.live(message)
            late.clear()
            follower.settle()
            assert follower.held == publisher.keys
    follower.settle()
    assert follower.held == publisher.keys
    health = follower.events.health()
    assert health.exact
    assert health.restarts >= 20
    assert health.losses == health.malformed == 0
    assert health.gaps > 100
    assert health.repeated > 100


def test_q1_a_gap_is_noticed_and_filled_by_replay() -> None:
    rng = random.Random(1)
    publisher = Publisher(rng)
    follower = Follower(publisher)
    follower.replay()
    for n in range(43):
        follower.live(publisher.compute(ROOTS[0], [*range(8), *([n] * 4)]))
    before = follower.held
    messages = [publisher.compute(ROOTS[0], [*range(8), *([n] * 4)]) for n in range(43, 46)]
    follower.live(messages[2])
    assert follower.held == before  # nothing is told out of order, and routing goes on with what was known
    assert follower.events.sequence.wanted == 42  # the last one that was taken too: it has to be the same
    follower.replay()
    assert follower.held == publisher.keys
    assert follower.events.health().gaps == 1


def test_q1_what_replay_no_longer_has_is_dropped_and_learned_again() -> None:
    publisher = Publisher(random.Random(1), memory=5)
    follower = Follower(publisher)
    for n in range(10):
        follower.live(publisher.compute(ROOTS[0], [n] * 8))
        follower.replay()
    assert follower.events.exact
    for n in range(10, 30):
        publisher.compute(ROOTS[0], [n] * 8)
    follower.live(publisher.compute(ROOTS[0], [99] * 8))
    follower.replay()
    health = follower.events.health()
    assert (health.exact, health.losses) == (False, 1)
    assert "beginning of its life" in str(health.problem)
    assert follower.held < publisher.keys
    assert len(follower.held) == 2 * 5  # what the five messages told
    follower.live(publisher.clear())
    assert follower.held == publisher.keys == set()


@pytest.mark.parametrize("first", [0, 1, 3])
def test_q2_a_backward_number_is_a_restart(first: int) -> None:
    """Also when the first messages of the new life were lost."""
    publisher = Publisher(random.Random(2), capacity=400)
    follower = Follower(publisher)
    follower.replay()
    for n in range(200):
        follower.live(publisher.compute(ROOTS[0], [n] * 8))
    old = follower.held
    assert len(old) == 400
    publisher.restart()
    for n in range(500, 505):
        message = publisher.compute(ROOTS[0], [n] * 8)
        if n >= 500 + first:
            follower.live(message)
            assert not old & follower.held
    follower.replay()
    assert follower.held == publisher.keys
    assert follower.events.health().restarts == 1


@pytest.mark.parametrize("published", [0, 3, 10, 50])
def test_q2_a_restart_is_found_out_without_any_event(published: int) -> None:
    """The new life may be as old, in numbers, as the former one, or older."""
    publisher = Publisher(random.Random(2))
    follower = Follower(publisher)
    follower.replay()
    for n in range(10):
        follower.live(publisher.compute(ROOTS[0], [n] * 8))
    assert follower.held
    publisher.restart()
    for n in range(published):
        publisher.compute(ROOTS[0], [100 + n] * 8)
    follower.settle()
    assert follower.held == publisher.keys
    assert follower.events.exact


def test_after_a_lost_connection_nothing_is_taken_before_the_life_is_verified() -> None:
    publisher = Publisher(random.Random(2))
    follower = Follower(publisher)
    follower.replay()
    for n in range(10):
        follower.live(publisher.compute(ROOTS[0], [n] * 8))
    held = follower.held
    publisher.restart()
    for n in range(10):
        publisher.compute(ROOTS[0], [100 + n] * 8)
    follower.events.sequence.doubt()
    follower.live(publisher.compute(ROOTS[0], [200] * 8))  # has the number that was expected next
    assert follower.held == held
    follower.replay()
    assert follower.held == publisher.keys


def test_without_replay_a_stream_is_followed_from_where_it_is() -> None:
    publisher = Publisher(random.Random(3))
    follower = Follower(publisher)
    sequence = follower.events.sequence

    def live(*, lost: bool = False) -> None:
        message = publisher.compute(publisher.rng.choice(ROOTS), [publisher.rng.randrange(9)] * 12)
        if not lost:
            follower.live(message)
        if sequence.wanted is not None:
            sequence.give_up()

    live()
    assert follower.events.exact
    for _ in range(20):
        live()
    assert follower.held == publisher.keys
    live(lost=True)
    live()
    assert not follower.events.exact
    publisher.restart()
    for _ in range(5):
        live()
    assert follower.held == publisher.keys
    assert follower.events.exact
    sequence.doubt()  # a connection that was lost and is back
    sequence.give_up()
    live()
    assert follower.held == publisher.keys
    publisher.restart()
    live(lost=True)
    for _ in range(1200):
        live()
    assert follower.held <= publisher.keys
    assert not follower.events.exact


def test_an_engine_whose_beginning_was_missed_is_known_when_its_cache_was_cleared() -> None:
    publisher = Publisher(random.Random(6), memory=5)
    for number in range(20):
        publisher.compute(ROOTS[0], [number] * 12)
    follower = Follower(publisher)
    follower.replay()
    assert (follower.events.exact, follower.held < publisher.keys) == (False, True)
    follower.live(publisher.clear())
    follower.live(publisher.compute(ROOTS[0], [7] * 12))
    assert (follower.events.exact, follower.held == publisher.keys) == (True, True)
    publisher.clear()  # a lost message may have been about anything that came after
    publisher.log.clear()
    follower.live(publisher.compute(ROOTS[0], [8] * 12))
    follower.replay()
    assert not follower.events.exact


def late_follower(algorithm: VllmHash | None, *, capacity: int = 40) -> Follower:
    """It began to listen when most of the engine's events could not be had any more."""
    publisher = Publisher(random.Random(9), capacity=capacity, memory=5)
    publisher.algorithm = algorithm
    for number in range(60):
        publisher.compute(ROOTS[0], [*range(12), *[number % 20] * 8, number])
    follower = Follower(publisher)
    follower.replay()
    return follower


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_what_a_late_gateway_did_not_hear_of_is_learned_as_requests_find_it(algorithm: VllmHash) -> None:
    follower = late_follower(algorithm)
    publisher, events = follower.publisher, follower.events
    assert (events.follows, events.exact) == (False, False)
    requests = 0
    while not events.exact:
        tokens = [*range(12), *[publisher.rng.randrange(20)] * 8, requests]
        follower.live(publisher.compute(ROOTS[0], tokens))
        events.found(ROOTS[0], tokens, publisher.hits * publisher.block_size)
        assert follower.held <= publisher.keys
        assert set(chain_keys(ROOTS[0], tokens, publisher.block_size)) <= follower.held
        assert events.follows
        requests += 1
        assert requests < 200
    assert requests > 5
    assert follower.held == publisher.keys


def test_names_that_nobody_can_compute_are_not_guessed() -> None:
    follower = late_follower(None)
    publisher, events = follower.publisher, follower.events
    for number in range(200):
        tokens = [*range(12), *[publisher.rng.randrange(20)] * 8, number]
        follower.live(publisher.compute(ROOTS[0], tokens))
        events.found(ROOTS[0], tokens, publisher.hits * publisher.block_size)
        assert follower.held <= publisher.keys
    assert (events.follows, events.exact) == (False, False)
    assert "beginning of its life" in str(events.health().problem)


def test_what_was_evicted_while_a_request_ended_is_not_learned_from_it() -> None:
    follower = late_follower("sha256", capacity=16)
    publisher, events = follower.publisher, follower.events
    for number in (19, 18):
        tokens = [*range(12), *[number] * 8, 1]
        follower.live(publisher.compute(ROOTS[0], tokens))
        if number == 19:
            events.found(ROOTS[0], tokens, publisher.hits * publisher.block_size)
    assert events.follows
    cached = publisher.hits * publisher.block_size
    assert cached == 20
    for number in range(16):
        follower.live(publisher.compute(ROOTS[1], [number] * 5))
    events.found(ROOTS[0], tokens, cached)  # what it found is gone by now
    assert follower.held <= publisher.keys


def test_a_late_message_from_before_the_subscription_does_no_harm() -> None:
    publisher = Publisher(random.Random(3), memory=4)
    follower = Follower(publisher)
    messages = [publisher.compute(ROOTS[0], [n] * 8) for n in range(20)]
    follower.replay()
    for message in (messages[2], messages[18], messages[19]):
        follower.live(message)
        follower.replay()
    assert follower.held <= publisher.keys
    assert len(follower.held) == 8
    follower.live(publisher.compute(ROOTS[0], [50] * 8))
    assert len(follower.held) == 10


def test_blocks_of_others_are_left_out() -> None:
    publisher = Publisher(random.Random(4))
    follower = Follower(publisher)
    follower.replay()
    for salt in ("somebody", "A" * 32, "0" * 31, "0" * 33):
        follower.live(publisher.compute(ROOTS[1], [len(salt)] * 8, salt=salt))
    assert follower.held == set()
    assert follower.events.exact
    follower.live(publisher.compute(ROOTS[2], [9] * 8))
    assert len(follower.held) == 2


def test_a_block_that_is_held_twice_is_gone_when_both_are() -> None:
    publisher = Publisher(random.Random(4))
    follower = Follower(publisher)
    follower.replay()
    stored = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "extra_keys": [[ROOTS[0].hex()]],
    }
    removed = {"type": "BlockRemoved", "block_hashes": [7]}
    follower.live(publisher.publish(stored, stored))
    follower.live(publisher.publish(removed))
    assert len(follower.held) == 1
    follower.live(publisher.publish(removed))
    assert follower.held == set()
    follower.live(publisher.publish(removed, stored | {"medium": "CPU"}, stored | {"group_idx": 1}))
    assert follower.held == set()


def test_the_index_is_bounded() -> None:
    publisher = Publisher(random.Random(5), capacity=300)
    follower = Follower(publisher, capacity=32)
    follower.replay()
    for n in range(100):
        follower.live(publisher.compute(ROOTS[0], [n] * 8))
        assert len(follower.held) <= 32
    health = follower.events.health()
    assert health.blocks == len(follower.held) >= 28
    assert (health.exact, health.malformed) == (False, 0)
    assert "index.max_blocks" in str(health.problem)
    assert follower.held <= publisher.keys


def test_events_that_do_not_tell_the_salt_are_of_no_use_and_it_is_said() -> None:
    publisher = Publisher(random.Random(5))
    follower = Follower(publisher)
    follower.replay()
    follower.live(publisher.publish(["BlockStored", [1], None, [1, 2], 2, None], ["BlockRemoved", [1]]))
    health = follower.events.health()
    assert (health.exact, health.malformed, follower.held) == (False, 0, set())
    assert "salt" in str(health.problem)


GOOD = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 4,
    "extra_keys": [[ROOTS[0].hex()]],
}
NESTED = b"\x91" * 100_000
HOSTILE = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "a number": b"\x07",
    "not a batch": msgspec.msgpack.encode({"ts": 1}),
    "no events": msgspec.msgpack.encode([1.0, None]),
    "event is a number": msgspec.msgpack.encode([1.0, [3]]),
    "event without type": msgspec.msgpack.encode([1.0, [{}]]),
    "fields missing": msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]),
    "negative token": msgspec.msgpack.encode([1.0, [GOOD | {"token_ids": [1, 2, 3, -4]}]]),
    "huge token": msgspec.msgpack.encode([1.0, [GOOD | {"token_ids": [1, 2, 3, 2**60]}]]),
    "block size 0": msgspec.msgpack.encode([1.0, [GOOD | {"block_size": 0}]]),
    "name is a text": msgspec.msgpack.encode([1.0, [GOOD | {"block_hashes": ["x"]}]]),
    "name is long": msgspec.msgpack.encode([1.0, [GOOD | {"block_hashes": [b"x" * 65]}]]),
    "two block sizes": msgspec.msgpack.encode([1.0, [GOOD, GOOD | {"block_size": 2, "token_ids": [1, 2]}]]),
    "one name for two": msgspec.msgpack.encode([1.0, [GOOD, GOOD | {"token_ids": [9, 9, 9, 9]}]]),
    "truncated": msgspec.msgpack.encode([1.0, [GOOD]])[:-4],
    "says it is huge": b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
    "nested": b"\x92\xcb" + bytes(8) + b"\x91\x82\xa4type\xabBlockStored\xaaextra_keys" + NESTED,
    "bad text": b"\x92\xcb" + bytes(8) + b"\x91\x81\xa4type\xa2\xff\xfe",
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_a_malformed_message_is_counted_and_the_index_begun_anew(payload: bytes) -> None:
    publisher = Publisher(random.Random(6))
    follower = Follower(publisher)
    follower.replay()
    follower.live(publisher.compute(ROOTS[0], [5] * 8))
    number, _ = publisher.publish()
    publisher.log[-1] = number, payload
    follower.live((number, payload))
    health = follower.events.health()
    assert (health.malformed, health.exact) == (1, False)
    assert follower.held == set()  # it may have told of any block
    follower.live(publisher.compute(ROOTS[0], [8] * 8))
    assert len(follower.held) == 2
    publisher.restart()
    follower.settle()
    assert follower.events.exact


@pytest.mark.parametrize("frames", [[], [b"x"], [b"", b"\0" * 7, b"x"], [b"", b"\xff" * 8, b"x"]])
def test_frames_that_are_no_message_are_counted(frames: list[bytes]) -> None:
    follower = Follower(Publisher(random.Random(6)))
    follower.replay()
    follower.events.receive(frames)
    assert follower.events.health().malformed == 1


def test_events_of_unknown_kinds_are_left_out() -> None:
    follower = Follower(Publisher(random.Random(6)))
    follower.replay()
    follower.live(follower.publisher.publish({"type": "BlockPinned", "x": 1}, ["Newer", 2], GOOD | {"new": [1]}))
    health = follower.events.health()
    assert (health.malformed, health.exact, health.blocks) == (0, True, 1)


def test_a_snapshot_tells_what_is_held_from_the_beginning() -> None:
    rng = random.Random(7)
    publisher, corpus = Publisher(rng), documents(rng)
    follower = Follower(publisher)
    follower.replay()
    for _ in range(200):
        follower.live(publisher.compute(*prompt(rng, corpus)))
    snapshot = follower.events.snapshot()
    assert snapshot[0] == AllBlocksCleared()
    follower.index.stored("r", [b"stale" * 4])
    follower.hear(snapshot)
    assert follower.held == publisher.keys
    known = {key: event for event in snapshot[1:] if isinstance(event, BlockStored) for key in event.block_hashes}
    assert set(known) == publisher.keys
    assert len(snapshot) < len(known)  # runs, not single blocks
