"""KV events over real sockets, from a publisher that speaks vLLM's dialect."""

from __future__ import annotations

import asyncio
import os
import random
import time
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
MESSAGES = int(os.environ.get("HEADSTART_KV_MESSAGES", "1200"))
"""Of the test with losses and restarts, which takes a few seconds for so many and minutes for 100000."""

QUIET_S = 10.0
"""So long after the last message the index has to equal the truth."""


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


def play(
    scenario: Scenario, *, replay: bool = True, before: int = 0, memory: int = 10_000, timeout_s: float = 2 * TIMEOUT_S
) -> None:
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

        async with asyncio.timeout(timeout_s), Sockets(publisher) as sockets:
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


def test_the_index_equals_the_truth_soon_after_losses_repeats_reordering_and_restarts() -> None:
    """1 % of the messages each are lost, sent twice, or late; the publisher dies 20 times in 100,000 messages."""
    rng = random.Random(MESSAGES)
    apart = min(MESSAGES // 2, 5000)
    restarts = [*range(apart // 2, MESSAGES, apart)]
    looked_at = {MESSAGES * share // 4 for share in (1, 2, 3, 4)}
    lost = 0

    async def scenario(bench: Bench) -> None:
        nonlocal lost
        late: list[tuple[int, bytes]] = []
        for step in range(1, MESSAGES + 1):
            if step in restarts:
                if step in restarts[::2]:  # on a fast machine a life is shorter than it takes to connect again
                    async with asyncio.timeout(QUIET_S):
                        await bench.agree()
                await bench.sockets.close()
                bench.publisher.restart()
                late.clear()  # they died with it
                bench.sockets.bind()
            tokens = [rng.randrange(6), *[rng.randrange(40)] * rng.randint(8, 20)]
            message = bench.publisher.compute(ROOT, tokens) or bench.publisher.publish()
            fate = rng.random()
            if fate < 0.01:
                lost += 1
            elif fate < 0.02:
                late.append(message)
            else:
                await bench.sockets.send(message)
                if fate < 0.03:
                    await bench.sockets.send(message)
                if late and rng.random() < 0.2:
                    await bench.sockets.send(late.pop(0))
            await asyncio.sleep(0.001 if step % 10 == 0 else 0.0)
            if step in looked_at:
                quiet_at = time.monotonic()
                async with asyncio.timeout(QUIET_S):
                    await bench.agree()
                print(f"{step} messages: equal {time.monotonic() - quiet_at:.2f} s after the last one")
        health = bench.feed.health()
        assert (
            health.restarts >= len(restarts) / 2
        )  # between two lives that were agreed upon; others may pass unnoticed
        assert health.gaps > 0
        assert (health.losses, health.malformed, health.failures) == (0, 0, 0)

    play(scenario, before=3, timeout_s=TIMEOUT_S + MESSAGES / 50)
    assert lost > MESSAGES / 200


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
        assert bench.feed.health().failures == 1

    play(scenario, before=4)


@pytest.mark.parametrize("replay", [True, False])
def test_a_listener_that_fails_while_what_was_missed_is_told_ends_nothing(
    replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 3

    def fail(*_: object) -> None:
        nonlocal failures
        failures -= 1
        if not failures:
            monkeypatch.undo()
        raise RuntimeError

    async def scenario(bench: Bench) -> None:
        number = 0
        while failures:
            number += 1
            await bench.publish(number)
            await asyncio.sleep(0.01)
        await until(lambda: bench.feed.health().failures == 3)
        bench.publisher.restart()
        await bench.publish(1, 2)
        await bench.agree()

    monkeypatch.setattr(ResidencyIndex, "stored", fail)
    play(scenario, replay=replay, before=4)


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
