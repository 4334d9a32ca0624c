"""The lean forward: transformers' tokens and logits for every configuration it takes, and no second copy of weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from engine.batch import Batch, Chunk
from engine.models import lean
from engine.models.lean_weights import lean_weights
from engine.models.loading import kv_bytes_per_block, resolve_kv_dtype
from engine.native.library import Kernels
from engine.runner import ModelRunner
from engine.wire import Sampling

from .conftest import SMALL, VOCABULARY

MakeModel = Callable[..., tuple[Any, Path]]
MakeEngine = Callable[..., Any]

TOKENS = 14
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MIXED = ["full_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama-tied": lambda: transformers.LlamaConfig(**(SMALL | {"tie_word_embeddings": True})),
    "llama-llama3-rope": lambda: transformers.LlamaConfig(**SMALL, head_dim=16, rope_parameters=LLAMA3),
    "llama-yarn": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama-biased": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": lambda: transformers.LlamaConfig(**(SMALL | {"num_key_value_heads": 1})),
    "mistral-window": lambda: transformers.MistralConfig(**SMALL, head_dim=24, sliding_window=11),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen2-mixed": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=9, layer_types=MIXED
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
}


def randomized(model: Any) -> None:
    """Norms and biases start as ones and zeros: with other values one that is left out is noticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def some_prompts() -> list[list[int]]:
    rng = random.Random(2)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(70)]
    return [shared[:count] + [rng.randrange(3, VOCABULARY) for _ in range(3)] for count in (0, 9, 40, 70, 70)]


@pytest.fixture(params=["torch", "kernels"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the runner: with and without the C++ kernels."""
    if request.param == "torch":
        return {}
    kernels = request.getfixturevalue("kernels")
    return {"kernels": lambda: kernels}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_those_of_transformers(
    name: str, options: dict[str, Any], tiny_model: MakeModel, model_engine: MakeEngine
) -> None:
    model, folder = tiny_model(CONFIGS[name]())
    randomized(model)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None
    prompts = some_prompts()
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    engine = model_engine(folder, num_blocks=200, **options)
    assert engine.runner.method.startswith("lean forward (kernels)" if options else "lean forward (torch)")
    greedy = Sampling(TOKENS, temperature=0.0, ignore_eos=True)
    cold, _ = engine.generate(prompts, greedy)
    warm, cached = engine.generate(prompts, greedy)
    assert cold == expected
    assert warm == expected
    assert cached[-1] >= 68


@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_are_those_of_transformers(name: str, options: dict[str, Any], tiny_model: MakeModel) -> None:
    model, folder = tiny_model(CONFIGS[name]())
    randomized(model)
    model.save_pretrained(folder)
    runner = ModelRunner(folder, dtype="float32", num_blocks=40, block_size=4, **options)
    prompt = some_prompts()[-1]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    seen: list[torch.Tensor] = []
    compute = runner._compute

    def watched(*arguments: Any) -> torch.Tensor:
        logits = compute(*arguments)
        seen.append(logits.clone())
        return logits

    runner._compute = watched
    greedy, table = Sampling(1, temperature=0.0), list(range(20))
    for start, end in ((0, 50), (50, 72), (72, 73)):  # many tokens, few, one
        runner.execute(Batch([Chunk(1, prompt[start:end], start, table, end == 73, greedy, 0, 0, window_table=table)]))
    torch.testing.assert_close(seen[-1][0], expected, atol=2e-4, rtol=1e-3)


def test_weights_are_moved_and_what_is_tied_stays_tied(tiny_model: MakeModel) -> None:
    model, _ = tiny_model(CONFIGS["llama-tied"]())
    before = sum(parameter.nbytes for parameter in model.parameters())
    expected = model(input_ids=torch.tensor([[3, 4, 5]])).logits
    weights = lean_weights(model, [None] * 3)
    assert weights is not None
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.parameters()}
    held |= {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in weights.layers
        for tensor in (layer.qkv, layer.gate_up, layer.output, layer.down)
    }
    assert sum(held.values()) == before
    assert weights.head.data_ptr() == weights.embedding.data_ptr()
    assert torch.equal(model(input_ids=torch.tensor([[3, 4, 5]])).logits, expected)


@pytest.mark.parametrize(
    "config",
    [
        lambda: transformers.LlamaConfig(**SMALL, hidden_act="gelu"),
        lambda: transformers.Gemma2Config(**SMALL, head_dim=8),
        lambda: transformers.Phi3Config(**SMALL),
    ],
    ids=["another-activation", "gemma2", "phi3"],
)
def test_what_is_not_understood_is_left_to_transformers(
    config: Callable[[], PreTrainedConfig], options: dict[str, Any], tiny_model: MakeModel
) -> None:
    _, folder = tiny_model(config())
    runner = ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4, **options)
    assert runner.method.startswith("transformers' modules")


def test_a_lean_forward_that_differs_is_not_used(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, folder = tiny_model(CONFIGS["llama"]())
    monkeypatch.setattr(lean, "silu_product", lambda gate_up, out: out.zero_())
    runner = ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4)
    assert runner.method == "transformers' modules, attention torch_cpu"
    assert "lean forward (torch), attention torch_cpu is not used: its output" in caplog.text


def test_kernels_that_compute_something_else_are_not_used_and_leave_the_weights_as_they_were(
    kernels: Kernels, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = tiny_model(CONFIGS["llama-tied"]())
    monkeypatch.setattr(Kernels, "forward", lambda self, arguments: None)
    runner = ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4, kernels=lambda: kernels)
    assert runner.method == "lean forward (torch), attention cpp_cpu"


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_cache_in_a_small_number_format_serves_and_takes_the_bytes_announced(
    kv_dtype: str, options: dict[str, Any], tiny_model: MakeModel, model_engine: MakeEngine
) -> None:
    _, folder = tiny_model(CONFIGS["qwen3"]())
    engine = model_engine(folder, kv_dtype=kv_dtype, num_blocks=64, **options)
    runner = engine.runner
    tokens, _ = engine.generate(some_prompts(), Sampling(TOKENS, temperature=0.0, ignore_eos=True))
    assert [len(generated) for generated in tokens] == [TOKENS] * len(tokens)
    assert (runner.dtype, runner.kv_dtype) == ("float32", kv_dtype)
    pool = runner._pool
    held = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales))
    assert held == 64 * kv_bytes_per_block(runner.info.layers, resolve_kv_dtype(kv_dtype, torch.float32), 4)
