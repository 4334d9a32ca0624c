"""KV events over real sockets, from a publisher that speaks vLLM's dialect."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from cache_policy.residency import ResidencyIndex
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from gateway.replicas.kv_feed import KvFeed
from gateway.server import run

from ..conftest import until
from .kv_publisher import Publisher, Sockets

ROOT = bytes(16)
TIMEOUT_S = 60.0


class Bench:
    """A publisher on sockets, and the feed that follows it."""

    def __init__(self, sockets: Sockets, feed: KvFeed, index: ResidencyIndex) -> None:
        self.sockets = sockets
        self.publisher = sockets.publisher
        self.feed = feed
        self.index = index

    @property
    def held(self) -> set[bytes]:
        return set(self.index.holds("r"))

    async def publish(self, *numbers: int) -> None:
        """Prompts are computed, and it is told."""
        for number in numbers:
            await self.sockets.send(self.publisher.compute(ROOT, [number] * 9))

    async def agree(self) -> None:
        """Wait until the index equals the truth."""
        await until(lambda: self.held == self.publisher.keys and self.feed.exact)


Scenario = Callable[[Bench], Awaitable[None]]


def play(scenario: Scenario, *, replay: bool = True, before: int = 0, memory: int = 10_000) -> None:
    """Play a scenario on a feed that was started after ``before`` messages."""

    async def main() -> None:
        publisher = Publisher(random.Random(1), memory=memory)
        index = ResidencyIndex()

        def tell(events: tuple[CacheEvent, ...]) -> None:
            for event in events:
                match event:
                    case BlockStored():
                        index.stored("r", event.block_hashes)
                    case BlockRemoved():
                        index.removed("r", event.block_hashes)
                    case AllBlocksCleared():
                        index.cleared("r")

        async with asyncio.timeout(2 * TIMEOUT_S), Sockets(publisher) as sockets:
            feed = KvFeed("r", sockets.endpoint, sockets.replay if replay else None, max_blocks=500, tell=tell)
            bench = Bench(sockets, feed, index)
            await bench.publish(*range(before))
            feed.up(0)
            feed.start()
            try:
                await scenario(bench)
            finally:
                await feed.stop()

    run(main())


@pytest.mark.parametrize("old_form", [False, True])
def test_what_was_told_before_is_learned_and_what_follows_is_heard(old_form: bool) -> None:
    async def scenario(bench: Bench) -> None:
        bench.sockets.old_form = old_form
        await bench.agree()
        await bench.publish(*range(100, 130))
        await bench.agree()
        assert bench.feed.problems() == ()
        assert bench.feed.health().messages == 40

    play(scenario, before=10)


def test_q1_a_lost_message_is_asked_for_also_when_nothing_follows_it() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.agree()
        bench.publisher.compute(ROOT, [200] * 9)
        await bench.publish(201)
        await bench.agree()
        bench.publisher.compute(ROOT, [202] * 9)  # the last one: no gap shows
        await bench.agree()
        assert bench.feed.health().losses == 0

    play(scenario, before=3)


def test_q2_a_restarted_engine_is_credited_with_nothing_old() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.agree()
        old = bench.held
        assert old
        await bench.sockets.close()
        bench.publisher.restart()
        bench.sockets.bind()
        await until(lambda: not bench.held)  # nothing was published in the new life
        await bench.publish(300)
        await bench.agree()
        assert not old & bench.held
        assert bench.feed.health().restarts >= 1

    play(scenario, before=20)


def test_a_connection_that_comes_back_to_the_same_life_loses_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.agree()
        await bench.sockets.close()
        bench.publisher.compute(ROOT, [400] * 9)
        bench.sockets.bind()
        await bench.agree()
        health = bench.feed.health()
        assert (health.restarts, health.losses) == (0, 0)

    play(scenario, before=20)


def test_what_is_down_for_the_gateway_is_followed_and_told_when_it_is_back() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.agree()
        bench.feed.down()  # a failed health check, say; the engine lives
        bench.index.forget("r")
        await bench.publish(500)
        await until(lambda: bench.feed.health().messages == 21)
        assert bench.held == set()
        bench.feed.up(0)
        assert bench.held == bench.publisher.keys

    play(scenario, before=20)


def test_without_replay_a_young_engine_is_followed_exactly_and_an_old_one_is_not() -> None:
    async def scenario(bench: Bench) -> None:
        number = 600
        while not bench.feed.health().messages:  # until the subscription has reached the publisher
            number += 1
            await bench.publish(number)
            await asyncio.sleep(0.01)
        assert not bench.feed.exact
        await until(lambda: "beginning of its life" in bench.feed.problems()[0])
        bench.publisher.restart()
        await bench.publish(1, 2)
        await bench.agree()

    play(scenario, replay=False, before=5)


def test_what_nobody_publishes_is_a_problem_in_words() -> None:
    async def main() -> None:
        feed = KvFeed("r", "tcp://127.0.0.1:1", None, max_blocks=5, tell=lambda events: None)
        feed.start()
        feed.up(0)
        assert not feed.exact
        assert "tcp://127.0.0.1:1" in feed.problems()[0]
        feed.resync()
        await feed.stop()
        await feed.stop()

    run(main())


def test_what_a_listener_fails_to_take_in_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.agree()

        def fail(*_: object) -> None:
            monkeypatch.undo()
            raise RuntimeError

        monkeypatch.setattr(ResidencyIndex, "stored", fail)
        await bench.publish(900)
        await bench.agree()

    play(scenario, before=4)


def test_rubbish_is_counted_and_the_feed_goes_on() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.agree()
        rubbish: tuple[tuple[bytes, ...], ...] = (
            (b"",),
            (b"x", b"y"),
            (b"t", b"\0" * 7, b"z"),
            (b"t", b"\xff" * 8, b"z"),
            (b"\0",) * 9,
        )
        for frames in rubbish:
            await bench.sockets.send_frames(*frames)
        number, _ = bench.publisher.publish()
        bench.publisher.log[-1] = number, b"\x91" * 10_000
        await bench.sockets.send(bench.publisher.log[-1])
        await until(lambda: bench.feed.health().malformed == len(rubbish) + 1)
        assert not bench.feed.exact
        bench.publisher.restart()
        await bench.publish(700)
        await bench.agree()

    play(scenario, before=4)


def test_a_publisher_that_promises_a_huge_message_is_cut_off() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.agree()
        await bench.sockets.send_frames(b"", b"\0" * 8, bytes(40 * 1024 * 1024))
        await bench.publish(800)
        await bench.agree()  # by replay, over another connection

    play(scenario, before=4)
