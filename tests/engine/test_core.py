"""Requests through the whole engine without a model: what they get, what they cost, and how they end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from cache_policy.keys import token_bytes
from engine.batch import Batch, ChunkResult
from engine.blocks import BlockManager, BlockTable
from engine.core import EngineCore
from engine.errors import CallError
from engine.scheduler import MAX_PREEMPTIONS, MAX_WAITS, Scheduler
from engine.scripted import ScriptedRunner, scripted_continuation
from engine.sequence import AGEING_S, choice_seed
from engine.sequence import Sequence as Running
from engine.wire import AllBlocksCleared, EngineInfo, Output, Sampling, StepReport, StepTiming, Submit

VOCABULARY = 1000
ROOT = b"namespace-number"


class Words:
    """A detokenizer that writes each token as a word, and stops at words."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop

    def push(self, token_id: int) -> tuple[str, bool]:
        word = f"w{token_id} "
        return ("", True) if word.strip() in self.stop else (word, False)

    def finish(self) -> str:
        return "."


class Failing(ScriptedRunner):
    """Raises in the steps whose number is in ``fail``."""

    fail: Sequence[int] = ()
    step = 0

    def execute(self, batch: Batch) -> list[ChunkResult]:
        self.step += 1
        if self.step in self.fail:
            for chunk in batch.chunks:  # leave garbage where the KV should be
                for block in chunk.block_table[chunk.start // self.block_size :]:
                    self.pool[block] = [b"garbage"] * self.block_size
            raise RuntimeError("out of memory")
        return super().execute(batch)


class Answer(msgspec.Struct):
    """Everything one choice of a request was told."""

    tokens: list[int] = []
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int | None = None
    prefill_s: float | None = None
    error: tuple[str, str] | None = None
    first_step: int | None = None

    def take(self, output: Output, step: int) -> None:
        assert self.finish_reason is None, "an output after the last one"
        if output.cached_tokens is not None:
            assert self.cached_tokens is None, "cached tokens are told once"
            assert not self.tokens
            self.cached_tokens, self.prefill_s = output.cached_tokens, output.prefill_s
            assert output.queue_s is not None
        if output.token_ids and self.first_step is None:
            self.first_step = step
        self.tokens += output.token_ids
        self.text += output.text
        self.finish_reason = output.finish_reason
        self.error = output.error


class Engine:
    """An engine on a scripted runner; its invariants are checked after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        *,
        max_batch_tokens: int = 256,
        max_running: int = 32,
        max_model_len: int = 10_000,
        eos: tuple[int, ...] = (),
        runner: type[ScriptedRunner] = ScriptedRunner,
    ) -> None:
        info = EngineInfo(
            model="scripted",
            root="",
            fingerprint="f",
            boot_id="b",
            max_model_len=min(max_model_len, num_blocks * block_size),
            num_blocks=num_blocks,
            block_size=block_size,
            dtype="none",
            device="cpu",
            vocab_size=VOCABULARY,
            eos_token_ids=eos,
            policy="lru",
            max_batch_tokens=max_batch_tokens,
        )
        self.runner = runner(num_blocks, block_size, vocab_size=VOCABULARY, eos=eos)
        self.core = EngineCore(self.runner, info, detokenizer=Words, max_running=max_running)
        self.choices: dict[int, list[Answer]] = {}
        self.reports: list[StepReport] = []
        self.budget = max_batch_tokens

    def submit(self, prompt: Sequence[int], count: int = 4, **options: Any) -> Answer:
        return self.submit_choices(1, prompt, count, **options)[0]

    def submit_choices(
        self,
        n: int,
        prompt: Sequence[int],
        count: int = 4,
        *,
        use_cache: bool = True,
        priority: int = 0,
        class_limit: int = 0,
        owner: str = "",
        max_cached_blocks: int = 0,
        **sampling: object,
    ) -> list[Answer]:
        id = len(self.choices)
        answers = self.choices[id] = [Answer() for _ in range(n)]
        chosen = Sampling(max_tokens=count, **{"temperature": 0, **sampling})  # type: ignore[arg-type]
        limits = (priority, class_limit, owner, max_cached_blocks)
        self.core.submit(Submit(id, token_bytes(list(prompt)), ROOT, chosen, use_cache, n, *limits))
        return answers

    @property
    def answers(self) -> list[Answer]:
        """The first choice of each request."""
        return [choices[0] for choices in self.choices.values()]

    def step(self) -> StepReport:
        report = self.core.step()
        assert report is not None
        self.reports.append(report)
        for output in report.outputs:
            choices = self.choices[output.id]
            choices[output.index].take(output, len(self.reports))
            if output.error is not None:  # it ends the whole request
                for choice in choices:
                    choice.finish_reason, choice.error = "error", output.error
        self.core.call("check", {})
        load = report.load
        assert load.used_blocks + load.cached_blocks + load.free_blocks == self.core.info.num_blocks
        if report.timing is not None:
            assert 0 < report.timing.prefill_tokens + report.timing.decode_tokens <= self.budget
        for queue in (self.core._scheduler.waiting, self.core._scheduler.running):
            for priority in {sequence.priority for sequence in queue}:
                ids = [sequence.id for sequence in queue if sequence.priority == priority]
                assert ids == sorted(ids)  # never an older one behind a newer one of its class
        return report

    def run(self) -> None:
        """Step until nothing is left to do; then nothing must be held either."""
        for _ in range(5000):
            if not self.core.has_work():
                break
            self.step()
        load = self.core.load()
        assert (load.running, load.waiting, load.used_blocks, load.queued_tokens) == (0, 0, 0, 0)
        assert all(choice.finish_reason is not None for choices in self.choices.values() for choice in choices)
        assert load.used_blocks == 0
        self.core.call("check", {})


def tok(first: int, count: int) -> list[int]:
    return [(first + i) % VOCABULARY for i in range(count)]


def noise(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(count)]


def expected(prompt: Sequence[int], count: int) -> list[int]:
    return scripted_continuation(prompt, count, vocab_size=VOCABULARY)


# --- scheduling must be invisible ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "budget", "use_cache"), [(2000, 512, False), (2000, 512, True), (40, 512, True), (40, 48, True)]
)
def test_e5_outputs_do_not_depend_on_scheduling(blocks: int, budget: int, use_cache: bool) -> None:
    shared = noise(0, 100)
    prompts = [(shared if i < 10 else []) + noise(i + 1, 20 + 3 * i) for i in range(34)]
    engine = Engine(blocks, max_batch_tokens=budget)
    for prompt in prompts:
        engine.submit(prompt, 30, use_cache=use_cache)
    engine.run()
    for prompt, answer in zip(prompts, engine.answers, strict=True):
        assert answer.tokens == expected(prompt, 30)
        assert answer.text == "".join(f"w{token} " for token in answer.tokens) + "."
        assert answer.finish_reason == "length"
    stats = engine.core.call("stats", {})
    hits = [answer.cached_tokens for answer in engine.answers]
    assert stats["cached_prompt_tokens"] == sum(hits)
    if blocks == 40:
        assert stats["preemptions"] > 0
        assert stats["evictions"] > 0
    if use_cache:
        assert sum(hits) > 0
    else:
        assert sum(hits) == 0
        assert not any(report.events for report in engine.reports)


@pytest.mark.parametrize("count", range(1, 50))
def test_b1_b2_a_repeated_prompt_hits_all_but_its_last_tokens_and_gives_the_same(count: int) -> None:
    engine = Engine()
    prompt = tok(100 * count, count)
    for hit in (0, *[16 * ((count - 1) // 16)] * 2):
        answer = engine.submit(prompt)
        engine.run()
        assert answer.cached_tokens == hit
        assert answer.tokens == expected(prompt, 4)


def test_generated_tokens_are_hit_by_the_next_turn() -> None:
    engine = Engine()
    first = engine.submit(tok(0, 20), 28)
    engine.run()
    conversation = [*tok(0, 20), *first.tokens, 5]
    second = engine.submit(conversation)
    engine.run()
    assert second.cached_tokens == 32  # the 48th token was sampled, but never computed
    assert second.tokens == expected(conversation, 4)


def test_prompts_computed_side_by_side_share_blocks_afterwards() -> None:
    engine = Engine()
    answers = [engine.submit(tok(0, 70), 20) for _ in range(3)]
    engine.run()
    assert [answer.tokens for answer in answers] == [expected(tok(0, 70), 20)] * 3
    assert engine.core.load().cached_blocks == 5  # 89 computed tokens, once


def test_a_seed_fixes_the_draws_whatever_else_runs() -> None:
    alone = Engine()
    first = alone.submit(tok(0, 30), 20, temperature=1.0, seed=-7)
    alone.run()
    crowded = Engine(12, max_batch_tokens=40)
    crowded.submit(tok(500, 90), 20)
    second = crowded.submit(tok(0, 30), 20, temperature=1.0, seed=-7)
    others = [crowded.submit(tok(0, 30), 20, temperature=1.0) for _ in range(2)]
    crowded.run()
    assert second.tokens == first.tokens
    assert others[0].tokens != first.tokens != others[1].tokens != others[0].tokens


# --- a prefix that is being computed already ------------------------------------------------------------


def stats(engine: Engine) -> dict[str, int]:
    return engine.core.call("stats", {})


def test_a_prefix_in_flight_is_computed_once_and_counts_as_cached() -> None:
    engine = Engine(max_batch_tokens=256)
    prefix = noise(1, 160)
    prompts = [[*prefix, *noise(seed, 20)] for seed in (2, 3, 4)]
    answers = [engine.submit(prompt) for prompt in prompts]
    engine.run()
    assert [answer.tokens for answer in answers] == [expected(prompt, 4) for prompt in prompts]
    assert [answer.cached_tokens for answer in answers] == [0, 160, 160]
    assert stats(engine)["shared_in_flight"] == 320
    assert engine.runner.computed_tokens == 160 + 3 * 20 + 3 * 3  # each answer's last token is never computed


def test_only_what_was_waited_for_counts_as_shared_in_flight() -> None:
    engine = Engine(max_batch_tokens=64)
    prefix = noise(1, 160)
    engine.submit(prefix[:65])
    engine.run()
    engine.submit(prefix)
    engine.step()
    second = engine.submit([*prefix, 7])
    engine.run()
    third = engine.submit([*prefix, 8])
    engine.run()
    assert (second.cached_tokens, third.cached_tokens) == (160, 160)
    assert stats(engine)["shared_in_flight"] == 160 - 64 - 64  # cached before, and computed in the first step


def test_a_request_waits_only_as_long_as_its_own_prefix_is_computed() -> None:
    engine = Engine(max_batch_tokens=32)
    long = noise(1, 320)
    engine.submit(long, 40)
    sharer = engine.submit([*long[:32], *noise(2, 4)], 4)
    engine.run()
    assert sharer.cached_tokens == 32
    assert sharer.first_step is not None
    assert sharer.first_step < 320 // 32


def test_nobody_waits_behind_a_request_that_waits_to_share() -> None:
    engine = Engine(max_batch_tokens=64)
    prefix = noise(1, 320)
    engine.submit(prefix, 4)
    sharer = engine.submit([*prefix, 3], 4)
    others = [engine.submit(noise(seed, 10), 4) for seed in range(5, 9)]
    engine.run()
    assert sharer.cached_tokens == 320
    assert sharer.first_step is not None
    assert all(other.first_step is not None and other.first_step < sharer.first_step for other in others)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_waiter_goes_on_by_itself_when_the_other_one_is_aborted(steps: int) -> None:
    engine = Engine(max_batch_tokens=64)
    prompt = noise(1, 180)
    engine.submit(prompt)
    waiter = engine.submit(prompt)
    for _ in range(steps):
        engine.step()
    engine.core.abort((0,))
    engine.step()
    assert engine.core.load().running == 1
    engine.run()
    assert waiter.tokens == expected(prompt, 4)
    assert waiter.cached_tokens == 64 * steps


def test_the_waiter_goes_on_by_itself_when_the_other_one_fails() -> None:
    engine = Engine(max_batch_tokens=64, runner=Failing)
    engine.runner.fail = (2,)  # type: ignore[attr-defined]
    prompt = noise(1, 180)
    failed, waiter = engine.submit(prompt), engine.submit(prompt)
    engine.run()
    assert failed.error is not None
    assert waiter.tokens == expected(prompt, 4)
    assert waiter.cached_tokens == 64


def test_the_waiter_goes_on_when_the_other_one_stops_publishing() -> None:
    engine = Engine(max_batch_tokens=64)
    prompt = noise(1, 180)
    first, waiter = engine.submit(prompt), engine.submit(prompt)
    engine.step()
    engine.core.call("reset_cache", {})
    engine.step()
    engine.step()
    assert engine.core.load().running == 2
    engine.run()
    assert first.tokens == waiter.tokens == expected(prompt, 4)
    assert waiter.cached_tokens == 0


def test_requests_that_bypass_the_cache_wait_for_nobody() -> None:
    engine = Engine(max_batch_tokens=64)
    prompt = noise(1, 180)
    first, second = engine.submit(prompt, use_cache=False), engine.submit(prompt, use_cache=False)
    engine.run()
    assert first.cached_tokens == second.cached_tokens == 0
    assert stats(engine)["shared_in_flight"] == 0


def test_no_wait_is_for_ever_even_if_there_is_always_another_one_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(max_batch_tokens=16)
    engine.submit(noise(1, 20), 40)
    engine.step()
    waiter = engine.submit(noise(2, 10), 4)
    monkeypatch.setattr(BlockManager, "in_flight", lambda self, table: BlockTable([1], ROOT))
    engine.run()
    assert waiter.tokens == expected(noise(2, 10), 4)
    assert waiter.first_step is not None
    assert waiter.first_step > MAX_WAITS


def test_sharing_under_pressure_changes_no_text_and_never_hangs() -> None:
    """Preemptions, aborts and waiting at once, over prompts that share prefixes of every length."""
    draw = random.Random(5)
    engine = Engine(26, max_batch_tokens=40, max_running=6)
    base = noise(1, 120)
    prompts = [[*base[: draw.randrange(1, 120)], *noise(i, draw.randrange(20))] for i in range(60)]
    answers = [engine.submit(prompt, 30) for prompt in prompts]
    aborted = set(draw.sample(range(60), 12))
    for id in sorted(aborted):
        engine.step()
        engine.core.abort((id,))
    engine.run()
    for id, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.tokens == expected(prompt, 30)[: len(answer.tokens)]
        assert id in aborted or len(answer.tokens) == 30
    assert engine.core.load().preemptions > 0
    assert stats(engine)["shared_in_flight"] > 0


# --- several choices of one prompt -----------------------------------------------------------------------


def choice_texts(
    engine: Engine,
    n: int,
    prompt: Sequence[int],
    count: int = 24,
    *,
    use_cache: bool = True,
    seed: int = 7,
    temperature: float = 1.0,
) -> list[list[int]]:
    answers = engine.submit_choices(n, prompt, count, use_cache=use_cache, seed=seed, temperature=temperature)
    engine.run()
    return [answer.tokens for answer in answers]


def test_d4_choices_differ_and_depend_on_the_seed_alone() -> None:
    engine = Engine()
    cold = choice_texts(engine, 4, tok(0, 40))
    warm = choice_texts(engine, 4, tok(0, 40))
    engine.core.call("reset_cache", {})
    reset = choice_texts(engine, 4, tok(0, 40))
    assert cold == warm == reset
    assert len({tuple(tokens) for tokens in cold}) == 4
    assert choice_texts(engine, 4, tok(0, 40), seed=8) != cold
    assert choice_texts(engine, 2, tok(0, 40)) == cold[:2]
    assert stats(engine)["prompt_tokens"] == 5 * 40  # each prompt once, however many choices it has


@pytest.mark.parametrize("length", [1, 16, 40, 48])
@pytest.mark.parametrize("use_cache", [True, False])
def test_choices_are_what_requests_of_their_own_would_get(length: int, use_cache: bool) -> None:
    engine = Engine(16, 16, max_batch_tokens=24)
    prompt = noise(1, length)
    together = choice_texts(engine, 4, prompt, use_cache=use_cache)
    alone = []
    for index in range(4):
        alone += choice_texts(engine, 1, prompt, seed=choice_seed(7, index), use_cache=use_cache)
    assert together == alone
    assert choice_texts(engine, 3, prompt, temperature=0.0) == [expected(prompt, 24)] * 3


def test_a_prompt_is_computed_once_and_its_blocks_are_shared_by_its_choices() -> None:
    engine = Engine()
    answers = engine.submit_choices(4, tok(0, 40), 4, temperature=1.0, seed=1)
    engine.step()
    assert engine.runner.computed_tokens == 40
    assert engine.core.load().used_blocks == 3
    assert [len(answer.tokens) for answer in answers] == [1] * 4
    assert [answer.cached_tokens for answer in answers] == [0, None, None, None]  # the prompt counts once
    engine.step()
    assert engine.core.load().used_blocks == 2 + 4  # the last one, not full, was copied for each but one
    engine.run()
    assert engine.runner.computed_tokens == 40 + 4 * 3


def test_choices_survive_preemption_and_small_chunks() -> None:
    tight = Engine(12, max_batch_tokens=20, max_running=8)
    roomy = Engine(200)
    prompts = [noise(seed, 50) for seed in (1, 2)]
    answers = [tight.submit_choices(4, prompt, 40, temperature=1.0, seed=3) for prompt in prompts]
    tight.run()
    assert tight.core.load().preemptions > 0
    for prompt, choices in zip(prompts, answers, strict=True):
        assert [choice.tokens for choice in choices] == choice_texts(roomy, 4, prompt, 40, seed=3)


def test_each_choice_ends_by_itself() -> None:
    engine = Engine()
    texts = choice_texts(engine, 3, tok(0, 20))
    stopped = engine.submit_choices(3, tok(0, 20), 24, temperature=1.0, seed=7, stop=(f"w{texts[1][4]}",))
    engine.run()
    assert [choice.finish_reason for choice in stopped] == ["length", "stop", "length"]
    assert stopped[1].tokens == texts[1][:5]
    assert [choice.tokens for choice in (stopped[0], stopped[2])] == [texts[0], texts[2]]
    at_once = engine.submit_choices(3, tok(0, 20), 1, temperature=1.0, seed=7)
    engine.run()
    assert [choice.tokens for choice in at_once] == [text[:1] for text in texts]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_ends_every_choice(steps: int) -> None:
    engine = Engine(max_batch_tokens=32)
    engine.submit_choices(3, noise(1, 60), 20, temperature=1.0)
    for _ in range(steps):
        engine.step()
    engine.core.abort((0,))
    report = engine.step()
    assert [(output.index, output.finish_reason) for output in report.outputs] == [(i, "abort") for i in range(3)]
    engine.run()


@pytest.mark.parametrize("failing_step", [1, 2, 3, 4])
def test_a_failing_step_ends_every_choice_of_its_request_with_one_error(failing_step: int) -> None:
    engine = Engine(max_batch_tokens=32, runner=Failing)
    engine.runner.fail = (failing_step,)  # type: ignore[attr-defined]
    engine.submit_choices(3, noise(1, 60), 20, temperature=1.0)
    engine.run()
    assert sum(output.error is not None for report in engine.reports for output in report.outputs) == 1


def test_a_broken_choice_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    broken = choice_texts(engine, 3, tok(0, 20))[0][0]
    push = Words.push

    def fail(self: Words, token_id: int) -> tuple[str, bool]:
        if token_id == broken:
            raise KeyError(token_id)
        return push(self, token_id)

    monkeypatch.setattr(Words, "push", fail)
    choices = engine.submit_choices(3, tok(0, 20), 20, temperature=1.0, seed=7)
    other = engine.submit(noise(4, 20), 3)
    engine.run()
    assert [choice.finish_reason for choice in choices] == ["error"] * 3
    assert other.tokens == expected(noise(4, 20), 3)


def test_choices_count_as_running_before_they_start() -> None:
    engine = Engine(max_running=4, max_batch_tokens=32)
    engine.submit_choices(3, noise(1, 60), 30, temperature=1.0)
    engine.submit_choices(2, noise(2, 20), 3)
    engine.submit(noise(3, 20), 3)
    most = 0
    while engine.core.has_work():
        most = max(most, engine.step().load.running)
    assert most <= 4


@pytest.mark.parametrize("n", [0, -1, 5])
def test_more_choices_than_may_run_are_refused(n: int) -> None:
    engine = Engine(max_running=4)
    engine.choices[0] = [Answer()]
    engine.core.submit(Submit(0, token_bytes([1]), ROOT, Sampling(max_tokens=1), True, n))
    engine.run()
    error = engine.choices[0][0].error
    assert error is not None
    assert error[0] == "invalid_request"
    assert "between 1 and 4" in error[1]


# --- classes ---------------------------------------------------------------------------------------------


def test_a_higher_class_is_admitted_before_a_lower_one_that_came_earlier() -> None:
    engine = Engine(max_running=1)
    engine.submit(tok(0, 20), 5)
    engine.step()
    low, lower = engine.submit(tok(100, 20), priority=1), engine.submit(tok(150, 20), priority=2)
    high = [engine.submit(tok(200 + 50 * i, 20)) for i in range(3)]
    engine.run()
    starts = [answer.first_step for answer in (*high, low, lower)]
    assert starts == sorted(starts)  # type: ignore[type-var]


def test_a_lower_class_gives_way_for_a_limited_time_only() -> None:
    engine = Engine(max_running=1)
    engine.submit(tok(0, 20), 5)
    engine.step()
    low = engine.submit(tok(100, 20), priority=2)
    (waiting,) = engine.core._scheduler.waiting
    waiting.arrived -= 2 * AGEING_S + 1  # it has waited for so long
    high = engine.submit(tok(200, 20))
    engine.run()
    assert low.first_step is not None
    assert high.first_step is not None
    assert low.first_step < high.first_step


def test_a_class_never_runs_more_than_its_limit_and_holds_up_no_other() -> None:
    engine = Engine()
    low = [engine.submit(noise(i, 20), 12, priority=3, class_limit=2) for i in range(5)]
    low += engine.submit_choices(3, noise(8, 20), 12, priority=3, class_limit=2)  # more than may run: they run alone
    other = engine.submit(tok(0, 20), 3, priority=4)
    engine.step()
    assert other.first_step is None or other.first_step == 1
    while engine.core.has_work():
        engine.step()
        running = [sequence.id for sequence in engine.core._scheduler.running if sequence.priority == 3]
        assert len(running) <= 2 or set(running) == {5}
    assert other.first_step == 1
    assert all(answer.finish_reason == "length" for answer in low)


def test_a_higher_class_is_never_preempted_for_a_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[Running] = []
    preempt = Scheduler._preempt

    def record(self: Scheduler, victim: Running) -> None:
        assert victim.urgency == max(sequence.urgency for sequence in self.running)
        preempted.append(victim)
        preempt(self, victim)

    monkeypatch.setattr(Scheduler, "_preempt", record)
    monkeypatch.setattr("engine.sequence.AGEING_S", 0.0)  # as if the lower class had waited long: it starts first
    engine = Engine(24, max_batch_tokens=64)
    prompts = [noise(i, 60) for i in range(8)]
    answers = [engine.submit(prompt, 60, priority=1 - i % 2) for i, prompt in enumerate(prompts)]
    engine.run()
    assert [answer.tokens for answer in answers] == [expected(prompt, 60) for prompt in prompts]
    assert {victim.priority for victim in preempted} >= {1}


def test_who_is_preempted_again_and_again_is_preempted_no_more() -> None:
    engine = Engine(12, max_batch_tokens=64)
    low = engine.submit(noise(0, 50), 90, priority=1)
    (sequence,) = engine.core._requests[0].live
    for _ in range(MAX_PREEMPTIONS):
        assert sequence.urgency == 1
        engine.step()
        engine.core._scheduler._preempt(sequence)
    engine.step()
    high = engine.submit(noise(1, 40), 60)
    engine.run()
    assert engine.core.load().preemptions > MAX_PREEMPTIONS
    assert sequence.preemptions == MAX_PREEMPTIONS
    assert low.tokens == expected(noise(0, 50), 90)
    assert high.tokens == expected(noise(1, 40), 60)


def test_small_steps_never_starve_the_answer_of_a_lower_class() -> None:
    engine = Engine(max_batch_tokens=4)
    low = engine.submit(noise(0, 3), 20, priority=3)
    while not low.tokens:
        engine.step()
    arrived = 0
    for _ in range(60):  # there are always requests of a higher class, whose choices a step is too small for
        if engine.core.load().waiting == 0:
            arrived += 1
            engine.submit_choices(2, noise(arrived, 2), 20, temperature=1.0)
        before = len(low.tokens)
        engine.step()
        assert low.finish_reason is not None or len(low.tokens) == before + 1
    assert arrived > 4
    engine.run()


def test_nobody_waits_for_a_lower_class_to_compute_a_prefix() -> None:
    engine = Engine(max_batch_tokens=32)
    prompt = noise(1, 320)
    low = engine.submit(prompt, priority=1)
    engine.step()
    high = engine.submit(prompt)
    engine.run()
    assert high.first_step is not None
    assert low.first_step is not None
    assert high.first_step <= low.first_step
    assert low.tokens == high.tokens == expected(prompt, 4)


@pytest.mark.parametrize("wrong", [{"priority": -1}, {"class_limit": -1}, {"max_cached_blocks": -1}])
def test_limits_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    engine = Engine()
    answer = engine.submit(tok(0, 20), **wrong)
    engine.run()
    assert answer.error is not None
    assert answer.error[0] == "invalid_request"


# --- what fits -------------------------------------------------------------------------------------------


def test_e1_what_can_never_fit_is_refused_at_once_and_disturbs_nobody() -> None:
    engine = Engine(32, max_model_len=2048)
    small = [engine.submit(tok(100 * i, 30), 20) for i in range(4)]
    engine.step()
    refused = engine.submit(tok(0, 600), 1)
    report = engine.step()
    assert refused.finish_reason == "error"
    assert refused.error is not None
    code, message = refused.error
    assert code == "context_length_exceeded"
    assert "600" in message
    assert "512" in message
    assert report.load.waiting == 0
    engine.run()
    assert [answer.tokens for answer in small] == [expected(tok(100 * i, 30), 20) for i in range(4)]


def test_e2_the_end_of_the_pool_ends_the_text() -> None:
    engine = Engine(32)
    answer = engine.submit(tok(0, 480), 200)
    engine.run()
    assert answer.finish_reason == "length"
    assert answer.tokens == expected(tok(0, 480), 32)


@pytest.mark.parametrize(("length", "fits"), [(511, True), (512, False)])
def test_the_announced_limit_is_the_enforced_one(length: int, fits: bool) -> None:
    engine = Engine(32)
    answer = engine.submit(tok(0, length), 1)
    engine.run()
    assert answer.finish_reason == ("length" if fits else "error")


@pytest.mark.parametrize(
    ("prompt", "count", "code"), [([], 1, "invalid_request"), ([1], 0, "invalid_request"), ([1000], 1, "invalid_token")]
)
def test_what_cannot_be_computed_is_refused(prompt: list[int], count: int, code: str) -> None:
    engine = Engine()
    answer = engine.submit(prompt, count)
    engine.run()
    assert answer.error is not None
    assert answer.error[0] == code


def test_torn_token_bytes_are_refused() -> None:
    engine = Engine()
    engine.choices[0] = [Answer()]
    engine.core.submit(Submit(0, b"\1\0\0", ROOT, Sampling(max_tokens=1)))
    engine.run()
    assert engine.answers[0].error is not None


def test_an_id_in_use_is_refused() -> None:
    engine = Engine()
    engine.submit(tok(0, 5))
    with pytest.raises(ValueError, match="in use"):
        engine.core.submit(Submit(0, token_bytes([1]), ROOT, Sampling(max_tokens=1)))


# --- pressure --------------------------------------------------------------------------------------------


def test_e4_preemption_makes_progress() -> None:
    engine = Engine(48)
    prompts = [noise(i, 200) for i in range(8)]
    answers = [engine.submit(prompt, 150) for prompt in prompts]
    engine.run()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == expected(prompt, 150)
    assert 0 < engine.core.load().preemptions <= 8 * 8
    silent = 0
    for report in engine.reports:
        silent = 0 if any(output.token_ids for output in report.outputs) else silent + 1
        assert silent < 5
    firsts = [answer.first_step or 0 for answer in answers]
    assert firsts == sorted(firsts)
    assert engine.runner.computed_tokens < 2 * 8 * 350  # recomputing does not eat up the gain


def test_m1_recomputing_a_preempted_request_counts_no_hits() -> None:
    engine = Engine(24)
    prompts = [noise(i, 100) for i in range(12)]
    for prompt in prompts:
        engine.submit(prompt, 60)
    engine.run()
    stats = engine.core.call("stats", {})
    assert stats["preemptions"] > 0
    assert stats["cached_prompt_tokens"] == 0
    assert stats["prompt_tokens"] == 12 * 100
    assert stats["recomputed_tokens"] > 0
    assert engine.runner.computed_tokens == 12 * 159 + stats["recomputed_tokens"]


def test_m2_a_waiting_request_is_counted_once_when_it_is_admitted() -> None:
    engine = Engine(24)
    warm = noise(0, 65)
    engine.submit(warm, 1)
    engine.run()
    engine.submit(noise(1, 300), 70)
    engine.step()
    prompt = [*warm[:64], *noise(2, 100)]
    answer = engine.submit(prompt)
    for _ in range(60):
        engine.step()
    assert answer.first_step is None
    assert engine.core.load().waiting == 1
    engine.run()
    stats = engine.core.call("stats", {})
    assert stats["prompt_tokens"] == 65 + 300 + 164
    assert stats["cached_prompt_tokens"] == answer.cached_tokens
    assert answer.tokens == expected(prompt, 4)


def test_nothing_is_admitted_that_would_be_preempted_at_once() -> None:
    engine = Engine(8)
    first, second = (engine.submit(noise(i, 64), 60) for i in range(2))
    engine.run()
    assert engine.core.load().preemptions == 0
    assert (first.first_step, second.first_step) == (1, 61)


def test_at_most_max_running_sequences_run() -> None:
    engine = Engine(max_running=3)
    for i in range(9):
        engine.submit(tok(100 * i, 10), 5)
    engine.run()
    assert max(report.load.running for report in engine.reports) <= 3


# --- fairness --------------------------------------------------------------------------------------------


def test_e6_a_long_prompt_stops_neither_streams_nor_short_prompts() -> None:
    engine = Engine(200, max_batch_tokens=64)
    stream = engine.submit(tok(0, 10), 200)
    for _ in range(20):
        engine.step()
    long = engine.submit(noise(1, 20 * 64), 2)
    engine.step()
    engine.step()
    short = engine.submit(noise(2, 10), 2)
    while long.first_step is None:
        report = engine.step()
        assert any(output.id == 0 for output in report.outputs)  # the stream gets a token in every step
    assert short.first_step is not None
    assert short.first_step < long.first_step
    engine.run()
    assert stream.tokens == expected(tok(0, 10), 200)


def test_short_prompts_never_starve_a_long_one() -> None:
    engine = Engine(400, max_batch_tokens=64)
    long = engine.submit(noise(1, 20 * 64), 1)
    for i in range(40):
        engine.submit(noise(i + 2, 14), 1)
        engine.step()
    assert long.first_step is not None
    assert long.first_step <= 28  # at least three quarters of every step were its own
    engine.run()


def test_two_long_prompts_are_computed_one_after_the_other() -> None:
    engine = Engine(400, max_batch_tokens=64)
    first, second = engine.submit(noise(1, 640), 1), engine.submit(noise(2, 640), 1)
    engine.run()
    assert (first.first_step, second.first_step) == (10, 20)


# --- endings ---------------------------------------------------------------------------------------------


def test_generation_ends_where_the_request_says() -> None:
    prompt = tok(0, 20)
    tokens = expected(prompt, 30)
    eos, other = tokens[9], tokens[4]
    assert tokens.index(eos) == 9
    assert tokens.index(other) == 4

    def ask(**sampling: object) -> Answer:
        engine = Engine(eos=(eos,))
        answer = engine.submit(prompt, 30, **sampling)
        engine.run()
        return answer

    words = [f"w{token} " for token in tokens]
    ended = ask()
    assert (ended.tokens, ended.finish_reason) == (tokens[:10], "stop")
    assert ended.text == "".join(words[:9]) + "."  # eos counts as a token, but has no text
    ignoring = ask(ignore_eos=True)
    assert (ignoring.tokens, ignoring.finish_reason) == (tokens, "length")
    stopped = ask(stop_token_ids=(other,))
    assert (stopped.tokens, stopped.finish_reason) == (tokens[:5], "stop")
    late = ask(stop_token_ids=(other,), min_tokens=6)
    assert late.tokens == tokens[:10]
    longer = ask(min_tokens=15)
    assert len(longer.tokens) >= 15
    assert longer.tokens[9] != eos
    text = ask(stop=(words[7].strip(),))
    assert (text.tokens, text.text, text.finish_reason) == (tokens[:8], "".join(words[:7]), "stop")
    engine = Engine(eos=(eos,))
    both = engine.submit(prompt, 10)  # the last token allowed is an eos
    engine.run()
    assert (both.tokens, both.finish_reason) == (tokens[:10], "stop")


@pytest.mark.parametrize("steps", [0, 1, 2, 8])
def test_an_abort_releases_everything_and_publishes_only_what_was_computed(steps: int) -> None:
    engine = Engine(32, max_batch_tokens=64)
    stays = engine.submit(tok(700, 30), 40)
    gone = engine.submit(noise(1, 180), 40)
    for _ in range(steps):
        engine.step()
    engine.core.abort((1, 99))
    engine.core.abort((1,))
    report = engine.step()
    assert [output.finish_reason for output in report.outputs if output.id == 1] == ["abort"]
    assert report.load.running + report.load.waiting == 1
    again = engine.submit([*noise(1, 180), 3], 4)
    engine.run()
    assert gone.tokens == expected(noise(1, 180), 40)[: len(gone.tokens)]
    assert again.tokens == expected([*noise(1, 180), 3], 4)
    assert again.cached_tokens == {0: 0, 1: 32, 2: 96, 8: 176}[steps]
    assert stays.tokens == expected(tok(700, 30), 40)


# --- faults ----------------------------------------------------------------------------------------------


def test_a_failing_step_ends_its_requests_and_nothing_it_wrote_is_ever_used() -> None:
    engine = Engine(32, max_batch_tokens=64, runner=Failing)
    engine.runner.fail = (3,)  # type: ignore[attr-defined]
    prompt = noise(1, 150)
    failed = engine.submit(prompt, 10)
    waiting = engine.submit(noise(2, 40), 4)
    engine.step()
    engine.step()
    engine.step()
    assert failed.error is not None
    assert failed.error[0] == "engine_error"
    assert "RuntimeError" in failed.error[1]
    assert engine.core.consecutive_failures == 1
    again = engine.submit(prompt, 10)
    engine.run()
    assert engine.core.consecutive_failures == 0
    assert again.cached_tokens == 128  # two chunks had been computed
    assert again.tokens == expected(prompt, 10)
    assert waiting.finish_reason in ("error", "length")


def test_repeated_failures_are_counted_and_never_hang() -> None:
    engine = Engine(runner=Failing)
    engine.runner.fail = (1, 2, 3)  # type: ignore[attr-defined]
    for failures in (1, 2, 3):
        engine.submit(tok(0, 10))
        engine.run()
        assert engine.core.consecutive_failures == failures


def test_a_broken_detokenizer_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    prompts = [tok(0, 20), tok(400, 20)]
    broken = expected(prompts[0], 3)[2]
    assert broken not in expected(prompts[1], 6)
    push = Words.push

    def fail(self: Words, token_id: int) -> tuple[str, bool]:
        if token_id == broken:
            raise KeyError(token_id)
        return push(self, token_id)

    monkeypatch.setattr(Words, "push", fail)
    first, second = (engine.submit(prompt, 6) for prompt in prompts)
    engine.run()
    assert first.finish_reason == "error"
    assert second.tokens == expected(prompts[1], 6)


# --- accounts --------------------------------------------------------------------------------------------


def test_timings_account_for_every_token_once() -> None:
    engine = Engine(max_batch_tokens=32)
    engine.submit(tok(0, 50), 3)
    engine.run()
    timings = [report.timing for report in engine.reports]
    assert all(timing is not None for timing in timings)
    counts = [msgspec.structs.astuple(timing)[:4] for timing in timings if isinstance(timing, StepTiming)]
    assert counts == [
        (32, sum(range(32)), 0, 0),
        (18, sum(range(32, 50)), 0, 0),
        (0, 0, 1, 50),
        (0, 0, 1, 51),
    ]
    prefill_s = engine.answers[0].prefill_s
    assert prefill_s == pytest.approx(sum(timing.seconds for timing in timings[:2] if timing is not None))


def test_reports_say_what_is_queued() -> None:
    engine = Engine(max_batch_tokens=32)
    engine.submit(tok(0, 50), 2)
    engine.submit(tok(500, 40), 1)
    assert engine.core.load().queued_tokens == 90
    assert engine.step().load.queued_tokens == 58
    engine.run()


# --- control ---------------------------------------------------------------------------------------------


def test_o9_switching_the_policy_under_load_changes_no_text() -> None:
    engine = Engine(40, max_batch_tokens=96)
    shared = noise(0, 64)
    prompts = [[*shared, *noise(i + 1, 60)] for i in range(12)]
    for prompt in prompts:
        engine.submit(prompt, 30)
    for name in ["fifo", "lru"] * 20:
        assert engine.core.call("set_policy", {"policy": name}) == {"policy": name}
        assert engine.core.info.policy == name
        engine.step()
    engine.run()
    assert [answer.tokens for answer in engine.answers] == [expected(prompt, 30) for prompt in prompts]
    assert engine.core.load().evictions > 0


def test_a_reset_under_load_changes_no_text_and_empties_the_cache() -> None:
    engine = Engine(64, max_batch_tokens=48)
    prompts = [noise(i, 100) for i in range(4)]
    for prompt in prompts:
        engine.submit(prompt, 20)
    for _ in range(10):
        engine.step()
    result = engine.core.call("reset_cache", {})
    assert result["kept"] == engine.core.load().used_blocks > 0
    assert AllBlocksCleared() in engine.step().events
    engine.run()
    assert [answer.tokens for answer in engine.answers] == [expected(prompt, 20) for prompt in prompts]
    engine.core.call("reset_cache", {})
    assert engine.core.has_work()  # the event is still to be told
    engine.run()
    answer = engine.submit(prompts[0])
    engine.run()
    assert answer.cached_tokens == 0


def test_wrong_calls_are_refused_with_what_is_known() -> None:
    engine = Engine()
    with pytest.raises(CallError, match="reset_cache"):
        engine.core.call("fly", {})
    with pytest.raises(CallError, match="lru"):
        engine.core.call("set_policy", {"policy": "clairvoyant"})
    with pytest.raises(CallError, match="lru"):
        engine.core.call("set_policy", {})
    engine.core._blocks._pool._empty.pop()
    with pytest.raises(CallError, match="invariant"):
        engine.core.call("check", {})


def test_nothing_to_do_is_said() -> None:
    engine = Engine()
    assert not engine.core.has_work()
    assert engine.core.step() is None
