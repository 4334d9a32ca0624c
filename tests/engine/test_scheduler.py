"""Who computes when, in engines without a model: waiting to share a prefix, classes, preemption and fairness."""

from __future__ import annotations

import random

import pytest

from engine.blocks import BlockManager, BlockTable
from engine.scheduler import MAX_PREEMPTIONS, MAX_WAITS, Scheduler
from engine.sequence import AGEING_S, Sequence

from .driven import ROOT, FailingRunner, ScriptedEngine, expected, noise, tok

# --- a prefix that is being computed already -------------------------------------------------------------


def test_a_prefix_in_flight_is_computed_once_and_counts_as_cached() -> None:
    engine = ScriptedEngine(max_batch_tokens=256)
    prefix = noise(1, 160)
    prompts = [[*prefix, *noise(seed, 20)] for seed in (2, 3, 4)]
    answers = [engine.start(prompt) for prompt in prompts]
    engine.run()
    assert [answer.tokens for answer in answers] == [expected(prompt, 4) for prompt in prompts]
    assert [answer.cached_tokens for answer in answers] == [0, 160, 160]
    assert engine.stats()["shared_in_flight"] == 320
    assert engine.runner.computed_tokens == 160 + 3 * 20 + 3 * 3  # each answer's last token is never computed


def test_only_what_was_waited_for_counts_as_shared_in_flight() -> None:
    engine = ScriptedEngine(max_batch_tokens=64)
    prefix = noise(1, 160)
    engine.start(prefix[:65])
    engine.run()
    engine.start(prefix)
    engine.step()
    second = engine.start([*prefix, 7])
    engine.run()
    third = engine.start([*prefix, 8])
    engine.run()
    assert (second.cached_tokens, third.cached_tokens) == (160, 160)
    assert engine.stats()["shared_in_flight"] == 160 - 64 - 64  # cached before, and computed in the first step


def test_a_request_waits_only_as_long_as_its_own_prefix_is_computed() -> None:
    engine = ScriptedEngine(max_batch_tokens=32)
    long = noise(1, 320)
    engine.start(long, 40)
    sharer = engine.start([*long[:32], *noise(2, 4)], 4)
    engine.run()
    assert sharer.cached_tokens == 32
    assert sharer.first_step is not None
    assert sharer.first_step < 320 // 32


def test_nobody_waits_behind_a_request_that_waits_to_share() -> None:
    engine = ScriptedEngine(max_batch_tokens=64)
    prefix = noise(1, 320)
    engine.start(prefix, 4)
    sharer = engine.start([*prefix, 3], 4)
    others = [engine.start(noise(seed, 10), 4) for seed in range(5, 9)]
    engine.run()
    assert sharer.cached_tokens == 320
    assert sharer.first_step is not None
    assert all(other.first_step is not None and other.first_step < sharer.first_step for other in others)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_waiter_goes_on_by_itself_when_the_other_one_is_aborted(steps: int) -> None:
    engine = ScriptedEngine(max_batch_tokens=64)
    prompt = noise(1, 180)
    engine.start(prompt)
    waiter = engine.start(prompt)
    for _ in range(steps):
        engine.step()
    engine.core.abort((0,))
    engine.step()
    assert engine.load.running == 1
    engine.run()
    assert waiter.tokens == expected(prompt, 4)
    assert waiter.cached_tokens == 64 * steps


def test_the_waiter_goes_on_by_itself_when_the_other_one_fails() -> None:
    engine = ScriptedEngine(max_batch_tokens=64, runner=FailingRunner)
    engine.runner.fail = (2,)  # type: ignore[attr-defined]
    prompt = noise(1, 180)
    failed, waiter = engine.start(prompt), engine.start(prompt)
    engine.run()
    assert failed.error is not None
    assert waiter.tokens == expected(prompt, 4)
    assert waiter.cached_tokens == 64


def test_the_waiter_goes_on_when_the_other_one_stops_publishing() -> None:
    engine = ScriptedEngine(max_batch_tokens=64)
    prompt = noise(1, 180)
    first, waiter = engine.start(prompt), engine.start(prompt)
    engine.step()
    engine.core.call("reset_cache", {})
    engine.step()
    engine.step()
    assert engine.load.running == 2
    engine.run()
    assert first.tokens == waiter.tokens == expected(prompt, 4)
    assert waiter.cached_tokens == 0


def test_requests_that_bypass_the_cache_wait_for_nobody() -> None:
    engine = ScriptedEngine(max_batch_tokens=64)
    prompt = noise(1, 180)
    first, second = engine.start(prompt, use_cache=False), engine.start(prompt, use_cache=False)
    engine.run()
    assert first.cached_tokens == second.cached_tokens == 0
    assert engine.stats()["shared_in_flight"] == 0


def test_no_wait_is_for_ever_even_if_there_is_always_another_one_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(max_batch_tokens=16)
    engine.start(noise(1, 20), 40)
    engine.step()
    waiter = engine.start(noise(2, 10), 4)
    monkeypatch.setattr(BlockManager, "in_flight", lambda self, table: BlockTable([1], ROOT))
    engine.run()
    assert waiter.tokens == expected(noise(2, 10), 4)
    assert waiter.first_step is not None
    assert waiter.first_step > MAX_WAITS


def test_sharing_under_pressure_changes_no_text_and_never_hangs() -> None:
    """Preemptions, aborts and waiting at once, over prompts that share prefixes of every length."""
    draw = random.Random(5)
    engine = ScriptedEngine(26, max_batch_tokens=40, max_running=6)
    base = noise(1, 120)
    prompts = [[*base[: draw.randrange(1, 120)], *noise(i, draw.randrange(20))] for i in range(60)]
    answers = [engine.start(prompt, 30) for prompt in prompts]
    aborted = set(draw.sample(range(60), 12))
    for id in sorted(aborted):
        engine.step()
        engine.core.abort((id,))
    engine.run()
    for id, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.tokens == expected(prompt, 30)[: len(answer.tokens)]
        assert id in aborted or len(answer.tokens) == 30
    assert engine.load.preemptions > 0
    assert engine.stats()["shared_in_flight"] > 0


# --- classes ---------------------------------------------------------------------------------------------


def test_a_higher_class_is_admitted_before_a_lower_one_that_came_earlier() -> None:
    engine = ScriptedEngine(max_running=1)
    engine.start(tok(0, 20), 5)
    engine.step()
    low, lower = engine.start(tok(100, 20), priority=1), engine.start(tok(150, 20), priority=2)
    high = [engine.start(tok(200 + 50 * i, 20)) for i in range(3)]
    engine.run()
    starts = [answer.first_step for answer in (*high, low, lower)]
    assert starts == sorted(starts)  # type: ignore[type-var]


def test_when_no_prompt_finds_a_window_block_the_last_of_them_gives_its_own_to_the_others() -> None:
    engine = ScriptedEngine(128, 4, max_batch_tokens=64, window=8, window_blocks=8)
    low, high = noise(1, 60), noise(2, 60)
    second = engine.start(low, priority=1)
    engine.step()
    first = engine.start(high)
    engine.step()
    assert engine.load.running == 2
    blocks = engine.core._blocks
    hoard = BlockTable(noise(3, 4), None)
    blocks.allocate(hoard)
    assert blocks.reserve(hoard, 40) == 16  # as pins may, it takes all four blocks that are left
    while first.finish_reason is None:
        engine.step()
    assert engine.load.preemptions == 1
    assert second.finish_reason is None
    blocks.free(hoard)
    engine.run()
    assert [first.tokens, second.tokens] == [expected(high, 4), expected(low, 4)]


def test_a_lower_class_gives_way_for_a_limited_time_only() -> None:
    engine = ScriptedEngine(max_running=1)
    engine.start(tok(0, 20), 5)
    engine.step()
    low = engine.start(tok(100, 20), priority=2)
    (waiting,) = engine.core._scheduler.waiting
    waiting.arrived -= 2 * AGEING_S + 1  # it has waited for so long
    high = engine.start(tok(200, 20))
    engine.run()
    assert low.first_step is not None
    assert high.first_step is not None
    assert low.first_step < high.first_step


def test_a_class_never_runs_more_than_its_limit_and_holds_up_no_other() -> None:
    engine = ScriptedEngine()
    low = [engine.start(noise(i, 20), 12, priority=3, class_limit=2) for i in range(5)]
    low += engine.start_choices(3, noise(8, 20), 12, priority=3, class_limit=2)  # more than may run: they run alone
    other = engine.start(tok(0, 20), 3, priority=4)
    engine.step()
    assert other.first_step is None or other.first_step == 1
    while engine.core.has_work():
        engine.step()
        running = [sequence.id for sequence in engine.core._scheduler.running if sequence.priority == 3]
        assert len(running) <= 2 or set(running) == {5}
    assert other.first_step == 1
    assert all(answer.finish_reason == "length" for answer in low)


def test_a_higher_class_is_never_preempted_for_a_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[Sequence] = []
    preempt = Scheduler._preempt

    def record(self: Scheduler, victim: Sequence) -> None:
        assert victim.urgency == max(sequence.urgency for sequence in self.running)
        preempted.append(victim)
        preempt(self, victim)

    monkeypatch.setattr(Scheduler, "_preempt", record)
    monkeypatch.setattr("engine.sequence.AGEING_S", 0.0)  # as if the lower class had waited long: it starts first
    engine = ScriptedEngine(24, max_batch_tokens=64)
    prompts = [noise(i, 60) for i in range(8)]
    answers = [engine.start(prompt, 60, priority=1 - i % 2) for i, prompt in enumerate(prompts)]
    engine.run()
    assert [answer.tokens for answer in answers] == [expected(prompt, 60) for prompt in prompts]
    assert {victim.priority for victim in preempted} >= {1}


def test_who_is_preempted_again_and_again_is_preempted_no_more() -> None:
    engine = ScriptedEngine(12, max_batch_tokens=64)
    low = engine.start(noise(0, 50), 90, priority=1)
    (sequence,) = engine.core._requests[0].live
    for _ in range(MAX_PREEMPTIONS):
        assert sequence.urgency == 1
        engine.step()
        engine.core._scheduler._preempt(sequence)
    engine.step()
    high = engine.start(noise(1, 40), 60)
    engine.run()
    assert engine.load.preemptions > MAX_PREEMPTIONS
    assert sequence.preemptions == MAX_PREEMPTIONS
    assert low.tokens == expected(noise(0, 50), 90)
    assert high.tokens == expected(noise(1, 40), 60)


def test_small_steps_never_starve_the_answer_of_a_lower_class() -> None:
    engine = ScriptedEngine(max_batch_tokens=4)
    low = engine.start(noise(0, 3), 20, priority=3)
    while not low.tokens:
        engine.step()
    arrived = 0
    for _ in range(60):  # there are always requests of a higher class, whose choices a step is too small for
        if engine.load.waiting == 0:
            arrived += 1
            engine.start_choices(2, noise(arrived, 2), 20, temperature=1.0)
        before = len(low.tokens)
        engine.step()
        assert low.finish_reason is not None or len(low.tokens) == before + 1
    assert arrived > 4
    engine.run()


def test_nobody_waits_for_a_lower_class_to_compute_a_prefix() -> None:
    engine = ScriptedEngine(max_batch_tokens=32)
    prompt = noise(1, 320)
    low = engine.start(prompt, priority=1)
    engine.step()
    high = engine.start(prompt)
    engine.run()
    assert high.first_step is not None
    assert low.first_step is not None
    assert high.first_step <= low.first_step
    assert low.tokens == high.tokens == expected(prompt, 4)


@pytest.mark.parametrize("wrong", [{"priority": -1}, {"class_limit": -1}, {"max_cached_blocks": -1}])
def test_limits_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    engine = ScriptedEngine()
    answer = engine.start(tok(0, 20), **wrong)
    engine.run()
    assert answer.error is not None
    assert answer.error[0] == "invalid_request"


# --- pressure --------------------------------------------------------------------------------------------


def test_e4_preemption_makes_progress() -> None:
    engine = ScriptedEngine(48)
    prompts = [noise(i, 200) for i in range(8)]
    answers = [engine.start(prompt, 150) for prompt in prompts]
    engine.run()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == expected(prompt, 150)
    assert 0 < engine.load.preemptions <= 8 * 8
    silent = 0
    for report in engine.reports:
        silent = 0 if any(output.token_ids for output in report.outputs) else silent + 1
        assert silent < 5
    firsts = [answer.first_step or 0 for answer in answers]
    assert firsts == sorted(firsts)
    assert engine.runner.computed_tokens < 2 * 8 * 350  # recomputing does not eat up the gain


def test_m1_recomputing_a_preempted_request_counts_no_hits() -> None:
    engine = ScriptedEngine(24)
    prompts = [noise(i, 100) for i in range(12)]
    for prompt in prompts:
        engine.start(prompt, 60)
    engine.run()
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["cached_prompt_tokens"] == 0
    assert stats["prompt_tokens"] == 12 * 100
    assert stats["recomputed_tokens"] > 0
    assert engine.runner.computed_tokens == 12 * 159 + stats["recomputed_tokens"]


def test_what_a_preempted_request_has_published_it_finds_again() -> None:
    engine = ScriptedEngine(8)
    first, second = engine.start(noise(1, 32), 20), engine.start(noise(2, 64), 20)
    engine.run()
    assert engine.load.preemptions == 1
    assert engine.stats()["recomputed_tokens"] == 16  # of 80: one of its blocks had to be evicted
    assert engine.runner.computed_tokens == 32 + 64 + 2 * 19 + 16
    assert (first.tokens, second.tokens) == (expected(noise(1, 32), 20), expected(noise(2, 64), 20))


def test_m2_a_waiting_request_is_counted_once_when_it_is_admitted() -> None:
    engine = ScriptedEngine(24)
    warm = noise(0, 65)
    engine.start(warm, 1)
    engine.run()
    engine.start(noise(1, 300), 70)
    engine.step()
    prompt = [*warm[:64], *noise(2, 100)]
    answer = engine.start(prompt)
    for _ in range(60):
        engine.step()
    assert answer.first_step is None
    assert engine.load.waiting == 1
    engine.run()
    stats = engine.stats()
    assert stats["prompt_tokens"] == 65 + 300 + 164
    assert stats["cached_prompt_tokens"] == answer.cached_tokens
    assert answer.tokens == expected(prompt, 4)


def test_nothing_is_admitted_that_would_be_preempted_at_once() -> None:
    engine = ScriptedEngine(8)
    first, second = (engine.start(noise(i, 64), 60) for i in range(2))
    engine.run()
    assert engine.load.preemptions == 0
    assert (first.first_step, second.first_step) == (1, 61)


def test_at_most_max_running_sequences_run() -> None:
    engine = ScriptedEngine(max_running=3)
    for i in range(9):
        engine.start(tok(100 * i, 10), 5)
    engine.run()
    assert max(report.load.running for report in engine.reports) <= 3


# --- fairness --------------------------------------------------------------------------------------------


def test_e6_a_long_prompt_stops_neither_streams_nor_short_prompts() -> None:
    engine = ScriptedEngine(200, max_batch_tokens=64)
    stream = engine.start(tok(0, 10), 200)
    for _ in range(20):
        engine.step()
    long = engine.start(noise(1, 20 * 64), 2)
    engine.step()
    engine.step()
    short = engine.start(noise(2, 10), 2)
    while long.first_step is None:
        report = engine.step()
        assert any(output.id == 0 for output in report.outputs)  # the stream gets a token in every step
    assert short.first_step is not None
    assert short.first_step < long.first_step
    engine.run()
    assert stream.tokens == expected(tok(0, 10), 200)


def test_short_prompts_never_starve_a_long_one() -> None:
    engine = ScriptedEngine(400, max_batch_tokens=64)
    long = engine.start(noise(1, 20 * 64), 1)
    for i in range(40):
        engine.start(noise(i + 2, 14), 1)
        engine.step()
    assert long.first_step is not None
    assert long.first_step <= 28  # at least three quarters of every step were its own
    engine.run()


def test_two_long_prompts_are_computed_one_after_the_other() -> None:
    engine = ScriptedEngine(400, max_batch_tokens=64)
    first, second = engine.start(noise(1, 640), 1), engine.start(noise(2, 640), 1)
    engine.run()
    assert (first.first_step, second.first_step) == (10, 20)
