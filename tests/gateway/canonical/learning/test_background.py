from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

from structlog.testing import capture_logs

from gateway.canonical.learning.background import MAX_WAITING, BackgroundLearning
from gateway.canonical.learning.learner import MAX_AT_ONCE_CHARS, TemplateLearner
from gateway.canonical.learning.observation import Source
from gateway.canonical.learning.tokens import MAX_TEXT_CHARS

SOURCE = Source("acme", "model")
RULES = " ".join(
    f"Rule {number}: answer what was asked in section {number * 7}, and nothing else." for number in range(30)
)


def text(number: int) -> str:
    return f"Session {number:08x}-{number * 7919:08x} of the assistant.\n{RULES}"


async def settled(learning: BackgroundLearning) -> None:
    async with asyncio.timeout(30):
        while not learning.idle:  # noqa: ASYNC110 - nothing tells when nothing is left
            await asyncio.sleep(0.001)


def run(learner: TemplateLearner, scenario: Callable[[BackgroundLearning], Any]) -> None:
    async def main() -> None:
        learning = BackgroundLearning(learner)
        try:
            await scenario(learning)
        finally:
            learning.close()

    asyncio.run(main())


class Slow(TemplateLearner):
    """Waits for a word before it learns in another thread than the first one it meets."""

    def __init__(self) -> None:
        super().__init__(salt=1)
        self.go = threading.Event()
        self.home = threading.get_ident()
        self.learned_elsewhere: list[str] = []

    def observe(self, source: Source, text: str, later: Callable[[Source, str], None] | None = None) -> None:
        if threading.get_ident() != self.home:
            assert later is None
            assert self.go.wait(30)
            self.learned_elsewhere.append(text)
        super().observe(source, text, later)


def test_the_same_is_learned_in_the_background_in_the_same_order() -> None:
    at_once, learner = TemplateLearner(salt=1), TemplateLearner(salt=1)
    chance = random.Random(1)
    texts = [text(chance.getrandbits(32)) if chance.random() < 0.8 else f"Hi {chance.random()}" for _ in range(60)]

    async def scenario(learning: BackgroundLearning) -> None:
        for shown in texts:
            at_once.observe(SOURCE, shown)
            learning.observe(SOURCE, shown)
            if chance.random() < 0.5:
                await settled(learning)
        await settled(learning)

    run(learner, scenario)
    assert learner.observed == at_once.observed == 60
    assert learner.examined == at_once.examined < 60
    assert learner.weight == at_once.weight
    (expected,), (found,) = at_once.templates(), learner.templates()
    assert found[1].form == expected[1].form
    assert (found[1].id, found[1].requests) == (expected[1].id, expected[1].requests)


def test_only_a_long_text_of_no_known_form_leaves_the_event_loop_and_what_comes_meanwhile_follows_it() -> None:
    learner = Slow()

    async def scenario(learning: BackgroundLearning) -> None:
        learning.observe(SOURCE, "x" * MAX_AT_ONCE_CHARS)
        assert learning.idle
        assert learner.observed == 1
        learning.observe(SOURCE, text(1))
        learning.observe(SOURCE, "short, but later")
        assert not learning.idle
        assert learner.observed == 1, "the event loop has not waited for it"
        learner.go.set()
        await settled(learning)
        for number in range(2, 9):
            learning.observe(SOURCE, text(number))
            await settled(learning)
        before = len(learner.learned_elsewhere)
        assert before < 9, "a template is known by now"
        learning.observe(SOURCE, text(9))
        assert learning.idle

    run(learner, scenario)
    assert learner.learned_elsewhere[:2] == [text(1), "short, but later"]


def test_what_nobody_has_time_for_is_counted_not_kept() -> None:
    learner = Slow()

    async def scenario(learning: BackgroundLearning) -> None:
        for number in range(MAX_WAITING + 4):
            learning.observe(SOURCE, text(number))
        assert learner.passed_over["busy"] == 3, "one is learned, so many wait"
        learner.go.set()
        await settled(learning)
        assert learner.observed == MAX_WAITING + 1

    run(learner, scenario)


def test_texts_that_are_too_long_or_too_many_of_no_form_are_counted() -> None:
    learner = TemplateLearner(salt=1)
    learner.observe(SOURCE, "x" * (MAX_TEXT_CHARS + 1))
    assert learner.passed_over == {"too_long": 1}
    chance = random.Random(2)
    for _ in range(20):
        learner.observe(SOURCE, "".join(chance.choices("abcdefgh ", k=MAX_TEXT_CHARS)))
    assert learner.passed_over["budget"] == learner.observed - learner.examined > 0


def test_a_text_that_cannot_be_learned_from_costs_no_other_one_and_is_told_once() -> None:
    class Failing(Slow):
        def _examine(self, source: Source, known: Any, shown: str) -> None:
            if shown in (text(1), text(2)):
                raise RuntimeError(shown)
            super()._examine(source, known, shown)

    learner = Failing()

    async def scenario(learning: BackgroundLearning) -> None:
        for number in range(1, 4):
            learning.observe(SOURCE, text(number))
        learner.go.set()
        await settled(learning)

    with capture_logs() as logs:
        run(learner, scenario)
    assert learner.learned_elsewhere == [text(1), text(2), text(3)]
    (told,) = logs
    assert told["event"] == "nothing could be learned from a text"
    assert RULES[:20] not in str(told)


def test_after_its_end_nothing_is_learned() -> None:
    learner = Slow()

    async def scenario(learning: BackgroundLearning) -> None:
        learning.observe(SOURCE, text(1))
        learning.observe(SOURCE, text(2))
        learning.close()
        learner.go.set()
        learning.observe(SOURCE, text(3))
        await settled(learning)
        learning.observe(SOURCE, "short enough to be learned from at once")
        learning._thread.shutdown(wait=True)

    run(learner, scenario)
    assert learner.learned_elsewhere in ([], [text(1)])
    assert learner.observed == len(learner.learned_elsewhere)
