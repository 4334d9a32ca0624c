"""Requests through the whole engine without a model: what they get, what they cost, and how they end."""

from __future__ import annotations

import msgspec
import pytest

from cache_policy.keys import token_bytes
from engine.errors import CallError
from engine.wire import AllBlocksCleared, Sampling, StepTiming, Submit

from .driven import ROOT, Answer, FailingRunner, ScriptedEngine, Words, expected, noise, tok

# --- scheduling must be invisible ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "budget", "use_cache"), [(2000, 512, False), (2000, 512, True), (40, 512, True), (40, 48, True)]
)
def test_e5_outputs_do_not_depend_on_scheduling(blocks: int, budget: int, use_cache: bool) -> None:
    shared = noise(0, 100)
    prompts = [(shared if i < 10 else []) + noise(i + 1, 20 + 3 * i) for i in range(34)]
    engine = ScriptedEngine(blocks, max_batch_tokens=budget)
    for prompt in prompts:
        engine.start(prompt, 30, use_cache=use_cache)
    engine.run()
    for prompt, answer in zip(prompts, engine.answers, strict=True):
        assert answer.tokens == expected(prompt, 30)
        assert answer.text == "".join(f"w{token} " for token in answer.tokens) + "."
        assert answer.finish_reason == "length"
    stats = engine.stats()
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
    engine = ScriptedEngine()
    prompt = tok(100 * count, count)
    for hit in (0, *[16 * ((count - 1) // 16)] * 2):
        answer = engine.start(prompt)
        engine.run()
        assert answer.cached_tokens == hit
        assert answer.tokens == expected(prompt, 4)


def test_a_block_is_hit_only_behind_the_prefix_that_it_was_computed_after() -> None:
    engine = ScriptedEngine()
    first, second, end = noise(1, 16), noise(2, 16), noise(3, 16)
    engine.ask([*first, *noise(4, 17)])
    engine.ask([*second, *end, 5])
    mixed = engine.start([*first, *end, 5])
    engine.run()
    assert mixed.cached_tokens == 16
    assert mixed.tokens == expected([*first, *end, 5], 4)


def test_generated_tokens_are_hit_by_the_next_turn() -> None:
    engine = ScriptedEngine()
    first = engine.start(tok(0, 20), 28)
    engine.run()
    conversation = [*tok(0, 20), *first.tokens, 5]
    second = engine.start(conversation)
    engine.run()
    assert second.cached_tokens == 32  # the 48th token was sampled, but never computed
    assert second.tokens == expected(conversation, 4)


def test_prompts_computed_side_by_side_share_blocks_afterwards() -> None:
    engine = ScriptedEngine()
    answers = [engine.start(tok(0, 70), 20) for _ in range(3)]
    engine.run()
    assert [answer.tokens for answer in answers] == [expected(tok(0, 70), 20)] * 3
    assert engine.load.cached_blocks == 5  # 89 computed tokens, once


def test_a_seed_fixes_the_draws_whatever_else_runs() -> None:
    alone = ScriptedEngine()
    first = alone.start(tok(0, 30), 20, temperature=1.0, seed=-7)
    alone.run()
    crowded = ScriptedEngine(12, max_batch_tokens=40)
    crowded.start(tok(500, 90), 20)
    second = crowded.start(tok(0, 30), 20, temperature=1.0, seed=-7)
    others = [crowded.start(tok(0, 30), 20, temperature=1.0) for _ in range(2)]
    crowded.run()
    assert second.tokens == first.tokens
    assert others[0].tokens != first.tokens != others[1].tokens != others[0].tokens


# --- what fits -------------------------------------------------------------------------------------------


def test_e1_what_can_never_fit_is_refused_at_once_and_disturbs_nobody() -> None:
    engine = ScriptedEngine(32, max_model_len=2048)
    small = [engine.start(tok(100 * i, 30), 20) for i in range(4)]
    engine.step()
    refused = engine.start(tok(0, 600), 1)
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
    engine = ScriptedEngine(32)
    answer = engine.start(tok(0, 480), 200)
    engine.run()
    assert answer.finish_reason == "length"
    assert answer.tokens == expected(tok(0, 480), 32)


@pytest.mark.parametrize(("length", "fits"), [(511, True), (512, False)])
def test_the_announced_limit_is_the_enforced_one(length: int, fits: bool) -> None:
    engine = ScriptedEngine(32)
    answer = engine.start(tok(0, length), 1)
    engine.run()
    assert answer.finish_reason == ("length" if fits else "error")


@pytest.mark.parametrize(
    ("prompt", "count", "code"), [([], 1, "invalid_request"), ([1], 0, "invalid_request"), ([1000], 1, "invalid_token")]
)
def test_what_cannot_be_computed_is_refused(prompt: list[int], count: int, code: str) -> None:
    engine = ScriptedEngine()
    answer = engine.start(prompt, count)
    engine.run()
    assert answer.error is not None
    assert answer.error[0] == code


def test_torn_token_bytes_are_refused() -> None:
    engine = ScriptedEngine()
    engine.told[0, 0] = Answer()
    engine.core.submit(Submit(0, b"\1\0\0", ROOT, Sampling(max_tokens=1)))
    engine.run()
    assert engine.answers[0].error is not None


def test_an_id_in_use_is_refused() -> None:
    engine = ScriptedEngine()
    engine.start(tok(0, 5))
    with pytest.raises(ValueError, match="in use"):
        engine.core.submit(Submit(0, token_bytes([1]), ROOT, Sampling(max_tokens=1)))


# --- endings ---------------------------------------------------------------------------------------------


def test_generation_ends_where_the_request_says() -> None:
    prompt = tok(0, 20)
    tokens = expected(prompt, 30)
    eos, other = tokens[9], tokens[4]
    assert tokens.index(eos) == 9
    assert tokens.index(other) == 4

    def ask(**sampling: object) -> Answer:
        engine = ScriptedEngine(eos=(eos,))
        answer = engine.start(prompt, 30, **sampling)
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
    engine = ScriptedEngine(eos=(eos,))
    both = engine.start(prompt, 10)  # the last token allowed is an eos
    engine.run()
    assert (both.tokens, both.finish_reason) == (tokens[:10], "stop")


@pytest.mark.parametrize("steps", [0, 1, 2, 8])
def test_an_abort_releases_everything_and_publishes_only_what_was_computed(steps: int) -> None:
    engine = ScriptedEngine(32, max_batch_tokens=64)
    stays = engine.start(tok(700, 30), 40)
    gone = engine.start(noise(1, 180), 40)
    for _ in range(steps):
        engine.step()
    engine.core.abort((1, 99))
    engine.core.abort((1,))
    report = engine.step()
    assert [output.finish_reason for output in report.outputs if output.id == 1] == ["abort"]
    assert report.load.running + report.load.waiting == 1
    again = engine.start([*noise(1, 180), 3], 4)
    engine.run()
    assert gone.tokens == expected(noise(1, 180), 40)[: len(gone.tokens)]
    assert again.tokens == expected([*noise(1, 180), 3], 4)
    assert again.cached_tokens == {0: 0, 1: 32, 2: 96, 8: 176}[steps]
    assert stays.tokens == expected(tok(700, 30), 40)


# --- faults ----------------------------------------------------------------------------------------------


def test_a_failing_step_ends_its_requests_and_nothing_it_wrote_is_ever_used() -> None:
    engine = ScriptedEngine(32, max_batch_tokens=64, runner=FailingRunner)
    engine.runner.fail = (3,)  # type: ignore[attr-defined]
    prompt = noise(1, 150)
    failed = engine.start(prompt, 10)
    waiting = engine.start(noise(2, 40), 4)
    engine.step()
    engine.step()
    engine.step()
    assert failed.error is not None
    assert failed.error[0] == "engine_error"
    assert "RuntimeError" in failed.error[1]
    assert engine.core.consecutive_failures == 1
    again = engine.start(prompt, 10)
    engine.run()
    assert engine.core.consecutive_failures == 0
    assert again.cached_tokens == 128  # two chunks had been computed
    assert again.tokens == expected(prompt, 10)
    assert waiting.finish_reason in ("error", "length")


def test_repeated_failures_are_counted_and_never_hang() -> None:
    engine = ScriptedEngine(runner=FailingRunner)
    engine.runner.fail = (1, 2, 3)  # type: ignore[attr-defined]
    for failures in (1, 2, 3):
        engine.start(tok(0, 10))
        engine.run()
        assert engine.core.consecutive_failures == failures


def test_a_broken_detokenizer_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    prompts = [tok(0, 20), tok(400, 20)]
    broken = expected(prompts[0], 3)[2]
    assert broken not in expected(prompts[1], 6)
    push = Words.push

    def fail(self: Words, token_id: int) -> tuple[str, bool]:
        if token_id == broken:
            raise KeyError(token_id)
        return push(self, token_id)

    monkeypatch.setattr(Words, "push", fail)
    first, second = (engine.start(prompt, 6) for prompt in prompts)
    engine.run()
    assert first.finish_reason == "error"
    assert second.tokens == expected(prompts[1], 6)


# --- accounts --------------------------------------------------------------------------------------------


def test_timings_account_for_every_token_once() -> None:
    engine = ScriptedEngine(max_batch_tokens=32)
    engine.start(tok(0, 50), 3)
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
    engine = ScriptedEngine(max_batch_tokens=32)
    engine.start(tok(0, 50), 2)
    engine.start(tok(500, 40), 1)
    assert engine.load.queued_tokens == 90
    assert engine.step().load.queued_tokens == 58
    engine.run()


# --- control ---------------------------------------------------------------------------------------------


def test_o9_switching_the_policy_under_load_changes_no_text() -> None:
    engine = ScriptedEngine(40, max_batch_tokens=96)
    shared = noise(0, 64)
    prompts = [[*shared, *noise(i + 1, 60)] for i in range(12)]
    for prompt in prompts:
        engine.start(prompt, 30)
    for name in ["fifo", "lru"] * 20:
        assert engine.core.call("set_policy", {"policy": name}) == {"policy": name}
        assert engine.core.info.policy == name
        engine.step()
    engine.run()
    assert [answer.tokens for answer in engine.answers] == [expected(prompt, 30) for prompt in prompts]
    assert engine.load.evictions > 0


def test_a_reset_under_load_changes_no_text_and_empties_the_cache() -> None:
    engine = ScriptedEngine(64, max_batch_tokens=48)
    prompts = [noise(i, 100) for i in range(4)]
    for prompt in prompts:
        engine.start(prompt, 20)
    for _ in range(10):
        engine.step()
    result = engine.core.call("reset_cache", {})
    assert result["kept"] == engine.load.used_blocks > 0
    assert AllBlocksCleared() in engine.step().events
    engine.run()
    assert [answer.tokens for answer in engine.answers] == [expected(prompt, 20) for prompt in prompts]
    engine.core.call("reset_cache", {})
    assert engine.core.has_work()  # the event is still to be told
    engine.run()
    answer = engine.start(prompts[0])
    engine.run()
    assert answer.cached_tokens == 0


def test_wrong_calls_are_refused_with_what_is_known() -> None:
    engine = ScriptedEngine()
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
    engine = ScriptedEngine()
    assert not engine.core.has_work()
    assert engine.core.step() is None
