"""Several choices of one prompt: they share its blocks, and each gets what a request of its own would have got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_policy.keys import token_bytes
from engine.attention.backend import KvPool, LayerShape
from engine.sequence import choice_seed
from engine.wire import Sampling, Submit

from .conftest import FORWARDS
from .driven import ROOT, Answer, FailingRunner, ScriptedEngine, Words, expected, noise, tok


def choice_texts(
    engine: ScriptedEngine,
    n: int,
    prompt: Sequence[int],
    count: int = 24,
    *,
    use_cache: bool = True,
    seed: int = 7,
    temperature: float = 1.0,
) -> list[list[int]]:
    answers = engine.start_choices(n, prompt, count, use_cache=use_cache, seed=seed, temperature=temperature)
    engine.run()
    return [answer.tokens for answer in answers]


def test_d4_choices_differ_and_depend_on_the_seed_alone() -> None:
    engine = ScriptedEngine()
    cold = choice_texts(engine, 4, tok(0, 40))
    warm = choice_texts(engine, 4, tok(0, 40))
    engine.core.call("reset_cache", {})
    reset = choice_texts(engine, 4, tok(0, 40))
    assert cold == warm == reset
    assert len({tuple(tokens) for tokens in cold}) == 4
    assert choice_texts(engine, 4, tok(0, 40), seed=8) != cold
    assert choice_texts(engine, 2, tok(0, 40)) == cold[:2]
    assert engine.stats()["prompt_tokens"] == 5 * 40  # each prompt once, however many choices it has


@pytest.mark.parametrize("length", [1, 16, 40, 48])
@pytest.mark.parametrize("use_cache", [True, False])
def test_choices_are_what_requests_of_their_own_would_get(length: int, use_cache: bool) -> None:
    engine = ScriptedEngine(16, 16, max_batch_tokens=24)
    prompt = noise(1, length)
    together = choice_texts(engine, 4, prompt, use_cache=use_cache)
    alone = []
    for index in range(4):
        alone += choice_texts(engine, 1, prompt, seed=choice_seed(7, index), use_cache=use_cache)
    assert together == alone
    assert choice_texts(engine, 3, prompt, temperature=0.0) == [expected(prompt, 24)] * 3


def test_a_prompt_is_computed_once_and_its_blocks_are_shared_by_its_choices() -> None:
    engine = ScriptedEngine()
    answers = engine.start_choices(4, tok(0, 40), 4, temperature=1.0, seed=1)
    engine.step()
    assert engine.runner.computed_tokens == 40
    assert engine.load.used_blocks == 3
    assert [len(answer.tokens) for answer in answers] == [1] * 4
    assert [answer.cached_tokens for answer in answers] == [0, None, None, None]  # the prompt counts once
    engine.step()
    assert engine.load.used_blocks == 2 + 4  # the last one, not full, was copied for each but one
    engine.run()
    assert engine.runner.computed_tokens == 40 + 4 * 3


def test_choices_survive_preemption_and_small_chunks() -> None:
    tight = ScriptedEngine(12, max_batch_tokens=20, max_running=8)
    roomy = ScriptedEngine(200)
    prompts = [noise(seed, 50) for seed in (1, 2)]
    answers = [tight.start_choices(4, prompt, 40, temperature=1.0, seed=3) for prompt in prompts]
    tight.run()
    assert tight.load.preemptions > 0
    for prompt, choices in zip(prompts, answers, strict=True):
        assert [choice.tokens for choice in choices] == choice_texts(roomy, 4, prompt, 40, seed=3)


def test_each_choice_ends_by_itself() -> None:
    engine = ScriptedEngine()
    texts = choice_texts(engine, 3, tok(0, 20))
    stopped = engine.start_choices(3, tok(0, 20), 24, temperature=1.0, seed=7, stop=(f"w{texts[1][4]}",))
    engine.run()
    assert [choice.finish_reason for choice in stopped] == ["length", "stop", "length"]
    assert stopped[1].tokens == texts[1][:5]
    assert [choice.tokens for choice in (stopped[0], stopped[2])] == [texts[0], texts[2]]
    at_once = engine.start_choices(3, tok(0, 20), 1, temperature=1.0, seed=7)
    engine.run()
    assert [choice.tokens for choice in at_once] == [text[:1] for text in texts]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_ends_every_choice(steps: int) -> None:
    engine = ScriptedEngine(max_batch_tokens=32)
    engine.start_choices(3, noise(1, 60), 20, temperature=1.0)
    for _ in range(steps):
        engine.step()
    engine.core.abort((0,))
    report = engine.step()
    assert [(output.index, output.finish_reason) for output in report.outputs] == [(i, "abort") for i in range(3)]
    engine.run()


@pytest.mark.parametrize("failing_step", [1, 2, 3, 4])
def test_a_failing_step_ends_every_choice_of_its_request_with_one_error(failing_step: int) -> None:
    engine = ScriptedEngine(max_batch_tokens=32, runner=FailingRunner)
    engine.runner.fail = (failing_step,)  # type: ignore[attr-defined]
    engine.start_choices(3, noise(1, 60), 20, temperature=1.0)
    engine.run()
    assert sum(output.error is not None for report in engine.reports for output in report.outputs) == 1


def test_a_broken_choice_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    broken = choice_texts(engine, 3, tok(0, 20))[0][0]
    push = Words.push

    def fail(self: Words, token_id: int) -> tuple[str, bool]:
        if token_id == broken:
            raise KeyError(token_id)
        return push(self, token_id)

    monkeypatch.setattr(Words, "push", fail)
    choices = engine.start_choices(3, tok(0, 20), 20, temperature=1.0, seed=7)
    other = engine.start(noise(4, 20), 3)
    engine.run()
    assert [choice.finish_reason for choice in choices] == ["error"] * 3
    assert other.tokens == expected(noise(4, 20), 3)


def test_choices_count_as_running_before_they_start() -> None:
    engine = ScriptedEngine(max_running=4, max_batch_tokens=32)
    engine.start_choices(3, noise(1, 60), 30, temperature=1.0)
    engine.start_choices(2, noise(2, 20), 3)
    engine.start(noise(3, 20), 3)
    most = 0
    while engine.core.has_work():
        most = max(most, engine.step().load.running)
    assert most <= 4


@pytest.mark.parametrize("n", [0, -1, 5])
def test_more_choices_than_may_run_are_refused(n: int) -> None:
    engine = ScriptedEngine(max_running=4)
    engine.told[0, 0] = Answer()
    engine.core.submit(Submit(0, token_bytes([1]), ROOT, Sampling(max_tokens=1), True, n))
    engine.run()
    error = engine.told[0, 0].error
    assert error is not None
    assert error[0] == "invalid_request"
    assert "between 1 and 4" in error[1]


# --- real models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FORWARDS)
@pytest.mark.parametrize("length", [1, 8, 22])
def test_d4_choices_are_what_requests_of_their_own_would_get(
    family: str,
    length: int,
    tiny_model: Callable[..., tuple[Any, Path]],
    model_engine: Callable[..., Any],
) -> None:
    engine = model_engine(tiny_model(FORWARDS[family]())[1], num_blocks=24)
    prompt = [(37 * i + 11) % 200 + 3 for i in range(length)]
    sampling = Sampling(14, temperature=1.0, seed=7, ignore_eos=True)
    alone, _ = engine.generate(
        [prompt] * 4,
        [Sampling(14, temperature=1.0, seed=choice_seed(7, index), ignore_eos=True) for index in range(4)],
        use_cache=False,
    )
    assert len({tuple(tokens) for tokens in alone}) >= 3
    assert engine.choices(prompt, sampling, 4) == alone
    assert engine.choices(prompt, sampling, 4) == alone  # warm now


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_block_is_copied_in_every_layer_with_its_scales(dtype: torch.dtype) -> None:
    pool = KvPool([LayerShape(2, 8, 8), LayerShape(1, 4, 6)], 5, 4, dtype)
    tensors = [*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales]
    for tensor in tensors:
        tensor.copy_(torch.randint(1, 100, tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    pool.copy([])
    pool.copy([(3, 0), (1, 4)])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[3, 1, 2, 3, 1]])
