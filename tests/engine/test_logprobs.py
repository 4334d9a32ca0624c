"""Log-probabilities of generated and prompt tokens: right whatever is cached, cut into chunks or preempted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.admission import MAX_PROMPT_LOGPROBS
from engine.models.catalog import DEFAULT_MODEL, ensure_model
from engine.scheduler import MAX_SCORED
from engine.wire import Output, Sampling, TokenLogprobs

from .conftest import FORWARDS
from .driven import noise, tok


def check_entry(entry: TokenLogprobs, token_id: int, count: int) -> None:
    """What holds of every entry: the parts agree with one another."""
    assert entry.token_id == token_id
    assert entry.logprob <= 0
    assert len(entry.top) == count
    values = [logprob for _, logprob in entry.top]
    assert values == sorted(values, reverse=True)
    assert sum(map(math.exp, values)) <= 1 + 1e-6
    place = [token for token, _ in entry.top].index(token_id) + 1 if entry.rank <= count else entry.rank
    assert entry.rank == place
    if entry.rank <= count:
        assert entry.top[place - 1] == (token_id, entry.logprob)


def check_whole(output: Output, prompt: list[int], logprobs: int | None, prompt_logprobs: int | None) -> None:
    assert len(output.logprobs) == (0 if logprobs is None else len(output.token_ids))
    assert len(output.prompt_logprobs) == (0 if prompt_logprobs is None else len(prompt) - 1)
    for entry, token in zip(output.logprobs, output.token_ids, strict=False):
        check_entry(entry, token, logprobs or 0)
    for entry, token in zip(output.prompt_logprobs, prompt[1:], strict=False):
        check_entry(entry, token, prompt_logprobs or 0)


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(None, None), (0, None), (None, 0), (3, 20), (20, 1)])
def test_what_is_asked_for_is_told_and_nothing_else(
    logprobs: int | None, prompt_logprobs: int | None, scripted_engine: Any
) -> None:
    engine = scripted_engine()
    plain = engine.ask(noise(1, 40))
    told = engine.ask(noise(1, 40), logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    assert told.token_ids == plain.token_ids
    check_whole(told, noise(1, 40), logprobs, prompt_logprobs)
    assert all(entry.rank == 1 for entry in told.logprobs)  # it was greedy


def test_a_greedy_token_is_scored_in_a_prompt_as_it_was_when_generated(scripted_engine: Any) -> None:
    engine = scripted_engine()
    prompt = noise(1, 20)
    first = engine.ask(prompt, max_tokens=9, logprobs=4)
    again = engine.ask([*prompt, *first.token_ids], prompt_logprobs=4)
    assert again.prompt_logprobs[19:] == first.logprobs


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40, 300])
def test_f1_prompt_logprobs_are_the_same_cold_and_warm(length: int, scripted_engine: Any) -> None:
    engine = scripted_engine(max_batch_tokens=48)
    prompt = tok(0, length)
    cold = engine.ask(prompt, max_tokens=1, prompt_logprobs=1)
    warm = engine.ask(prompt, max_tokens=1, prompt_logprobs=1)
    check_whole(cold, prompt, None, 1)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert warm.cached_tokens == 0
    assert engine.ask(prompt).cached_tokens == (length - 1) // 16 * 16  # its blocks are there for others


def test_prompt_logprobs_neither_wait_for_a_prefix_in_flight_nor_keep_others_from_it(scripted_engine: Any) -> None:
    engine = scripted_engine(max_batch_tokens=64)
    prompt = noise(1, 180)
    ids = [engine.queue(prompt, prompt_logprobs=2), engine.queue(prompt, prompt_logprobs=2), engine.queue(prompt)]
    engine.run()
    first, second, third = (engine.whole(id) for id in ids)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert third.cached_tokens == 176
    assert first.token_ids == second.token_ids == third.token_ids


def test_prompt_logprobs_survive_preemption_and_are_computed_once(scripted_engine: Any) -> None:
    roomy = scripted_engine(num_blocks=400)
    prompts = [noise(seed, 60) for seed in range(6)]
    expected = [roomy.ask(prompt, max_tokens=60, logprobs=2, prompt_logprobs=2) for prompt in prompts]
    tight = scripted_engine(num_blocks=20, max_batch_tokens=40)
    ids = [tight.queue(prompt, max_tokens=60, logprobs=2, prompt_logprobs=2) for prompt in prompts]
    tight.run()
    assert tight.core.load().preemptions > 0
    for id, prompt, whole in zip(ids, prompts, expected, strict=True):
        answer = tight.whole(id)
        check_whole(answer, prompt, 2, 2)
        assert (answer.token_ids, answer.logprobs) == (whole.token_ids, whole.logprobs)
        assert answer.prompt_logprobs == whole.prompt_logprobs


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_preempted_prefill_goes_on_with_the_prompt_logprobs_that_it_has(steps: int, scripted_engine: Any) -> None:
    engine = scripted_engine(max_batch_tokens=40)
    prompt = noise(1, 150)
    expected = engine.ask(prompt, prompt_logprobs=3)
    engine.core.call("reset_cache", {})
    computed = engine.runner.computed_tokens
    id = engine.queue(prompt, prompt_logprobs=3)
    for _ in range(steps):
        engine.step()
    (sequence,) = engine.core._scheduler.running
    engine.core._scheduler._preempt(sequence)
    engine.run()
    assert engine.whole(id).prompt_logprobs == expected.prompt_logprobs
    # What it had published is hit, but for what has no log-probabilities yet.
    assert engine.runner.computed_tokens - computed == 150 + 3 + 40 * steps % 16


def test_no_step_scores_more_prompt_tokens_than_it_may(scripted_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(max_batch_tokens=512)
    scored: list[int] = []
    execute = engine.runner.execute

    def watched(batch: Any) -> Any:
        scored.append(sum(len(chunk.scored) for chunk in batch.chunks))
        return execute(batch)

    monkeypatch.setattr(engine.runner, "execute", watched)
    ids = [engine.queue(noise(seed, 170), prompt_logprobs=1) for seed in range(4)]
    plain = engine.queue(noise(9, 200))
    engine.step()
    assert engine.told[plain, 0].parts, "others are not held up"
    engine.run()
    assert max(scored) == MAX_SCORED
    assert sum(scored) == 4 * 169
    for seed, id in enumerate(ids):
        check_whole(engine.whole(id), noise(seed, 170), None, 1)


def test_each_choice_has_its_own_logprobs_and_the_first_those_of_the_prompt(scripted_engine: Any) -> None:
    engine = scripted_engine()
    prompt = noise(1, 30)
    id = engine.queue(prompt, n=3, temperature=1.0, seed=5, logprobs=2, prompt_logprobs=0)
    engine.run()
    wholes = [engine.whole(id, index) for index in range(3)]
    assert [len(whole.prompt_logprobs) for whole in wholes] == [29, 0, 0]
    for index, whole in enumerate(wholes):
        check_whole(whole, prompt, 2, 0 if index == 0 else None)
    assert len({whole.token_ids for whole in wholes}) == 3


def test_an_abort_before_the_first_token_tells_no_part_of_the_prompt(scripted_engine: Any) -> None:
    engine = scripted_engine(max_batch_tokens=32)
    id = engine.queue(noise(1, 100), prompt_logprobs=1)
    engine.step()
    engine.core.abort((id,))
    engine.run()
    assert engine.whole(id).prompt_logprobs == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": -1},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 10**6},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -3.0},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e30},
        {"repetition_penalty": math.nan},
        {"logit_bias": ((1000, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((5, math.inf),)},
        {"logit_bias": ((5, math.nan),)},
        {"logit_bias": ((5, 1e30),)},
        {"logit_bias": tuple((token, 1.0) for token in range(301))},
    ],
    ids=str,
)
def test_f3_i10_what_is_out_of_range_is_refused_and_disturbs_nobody(
    wrong: dict[str, object], scripted_engine: Any
) -> None:
    engine = scripted_engine()
    expected = engine.ask(noise(2, 20)).token_ids
    refused, other = engine.queue(noise(1, 20), **wrong), engine.queue(noise(2, 20))
    engine.run()
    error = engine.whole(refused).error
    assert error is not None
    assert error[0] == "invalid_request"
    assert next(iter(wrong)).split("_")[-1].rstrip("s") in error[1]
    assert engine.whole(other).token_ids == expected


def test_more_prompt_logprobs_than_fit_a_message_are_refused(scripted_engine: Any) -> None:
    engine = scripted_engine(num_blocks=2000)
    most = MAX_PROMPT_LOGPROBS // 21
    error = engine.ask(noise(1, most + 1), prompt_logprobs=20).error
    assert error is not None
    assert str(most) in error[1]


# --- real models -----------------------------------------------------------------------------------------


def check_model(told: tuple[TokenLogprobs, ...], expected: torch.Tensor, token_ids: list[int], count: int) -> None:
    """Entries against rows of log-probabilities by transformers."""
    assert len(told) == len(token_ids)
    for entry, row, token in zip(told, expected, token_ids, strict=True):
        check_entry(entry, token, count)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == pytest.approx(int((row > row[token]).sum()) + 1, abs=1)
        best = row.topk(count).values.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best, abs=1e-4)
        for place, logprob in entry.top:
            assert logprob == pytest.approx(float(row[place]), abs=1e-4)


@pytest.mark.parametrize("family", FORWARDS)
def test_f1_logprobs_are_those_of_the_model_whatever_is_cached_or_cut(
    family: str, tiny_model: Callable[..., tuple[Any, Path]], model_engine: Callable[..., Any]
) -> None:
    model, folder = tiny_model(FORWARDS[family]())
    prompts = [noise(1, 1, 211), noise(2, 24, 211), noise(2, 16, 211) + noise(3, 9, 211), noise(4, 14, 211)]
    for options in ({"max_batch_tokens": 64}, {"max_batch_tokens": 7}, {"num_blocks": 24, "max_batch_tokens": 9}):
        engine = model_engine(folder, **options)
        for _ in range(2):
            sampling = Sampling(24, temperature=1.0, seed=3, ignore_eos=True, logprobs=4, prompt_logprobs=3)
            for prompt, output in zip(prompts, engine.answers(prompts, sampling), strict=True):
                whole = [*prompt, *output.token_ids]
                with torch.inference_mode():
                    rows = model(input_ids=torch.tensor([whole])).logits[0].float().log_softmax(-1)
                check_model(output.prompt_logprobs, rows[: len(prompt) - 1], prompt[1:], 3)
                check_model(output.logprobs, rows[len(prompt) - 1 : -1], list(output.token_ids), 4)
                assert output.cached_tokens == 0
    assert engine.load.preemptions > 0


@pytest.mark.model
def test_f1_prompt_logprobs_of_the_default_model_agree_cold_and_warm(model_engine: Callable[..., Any]) -> None:
    engine = model_engine(ensure_model(DEFAULT_MODEL), num_blocks=16, block_size=16, threads=torch.get_num_threads())
    prompt = tok(0, 40)
    sampling = Sampling(1, temperature=0.0, prompt_logprobs=1)
    cold, warm = (engine.answers([prompt], sampling)[0] for _ in range(2))
    (plain,) = engine.answers([prompt], Sampling(1, temperature=0.0))
    assert plain.cached_tokens == 32
    assert len(cold.prompt_logprobs) == len(warm.prompt_logprobs) == 39
    for once, again, token in zip(cold.prompt_logprobs, warm.prompt_logprobs, prompt[1:], strict=True):
        check_entry(once, token, 1)
        assert again.logprob == pytest.approx(once.logprob, abs=1e-4)
        assert again.top[0][1] == pytest.approx(once.top[0][1], abs=1e-4)
