"""Models with sliding windows: what leaves the window is given back while they run, and no token comes out otherwise.

Every engine here is poisoned (see ``poison``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.batch import Batch, ChunkResult
from engine.models.loading import kv_bytes_per_block
from engine.sequence import choice_seed
from engine.windows import window_span
from engine.wire import Sampling

from .conftest import VOCABULARY, ModelEngine
from .poison import poison

MakeEngine = Callable[..., ModelEngine]

BLOCK = 4
WINDOW = 10
SPAN = window_span(WINDOW, BLOCK)
TOKENS = 20
GREEDY = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
MIXED = ["sliding_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # or a token would be followed by itself, whatever it sees
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: transformers.MistralConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"}, use_sliding_window=True, layer_types=MIXED
    ),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, layer_types=MIXED, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, layer_types=MIXED),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE
    ),
}
METHODS = {  # with the C++ kernels, and by PyTorch alone
    "mistral": ("lean forward (kernels), attention cpp_cpu", "lean forward (torch), attention torch_cpu"),
    "qwen2": ("lean forward (kernels), attention cpp_cpu", "lean forward (torch), attention torch_cpu"),
}
MODULES = ("transformers' modules, attention cpp_cpu", "transformers' modules, attention torch_cpu")


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings of several lengths, all longer than the window."""
    draw = random.Random(seed)
    stems = [[draw.randrange(1, VOCABULARY) for _ in range(40)] for _ in range(3)]
    return [
        stems[i % 3][: draw.choice([14, 23, 40])]
        + [draw.randrange(1, VOCABULARY) for _ in range(draw.randrange(3, 20))]
        for i in range(count)
    ]


class Windowed(NamedTuple):
    family: str
    kernels: bool
    folder: Path
    model: Any
    asked: list[list[int]]
    wanted: list[list[int]]


# Each family with the C++ kernels, and for each kind of forward one by PyTorch alone.
@pytest.fixture(
    scope="module",
    params=[*((family, True) for family in CONFIGS), ("mistral", False), ("gpt-oss", False)],
    ids=lambda case: f"{case[0]}-{'kernels' if case[1] else 'torch'}",
)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    """A model in which every layer, or every second one, sees fewer tokens than the prompts have."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    family, kernels = request.param
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    asked = prompts(6)
    return Windowed(family, kernels, folder, model, asked, [expected(model, prompt, TOKENS) for prompt in asked])


@pytest.fixture
def serve(request: pytest.FixtureRequest, windowed: Windowed, model_engine: MakeEngine) -> MakeEngine:
    """Makes poisoned engines for the model."""
    kernels = request.getfixturevalue("kernels") if windowed.kernels else None

    def make(**options: Any) -> ModelEngine:
        engine = model_engine(windowed.folder, block_size=BLOCK, kernels=lambda: kernels, **options)
        assert engine.runner.method == METHODS.get(windowed.family, MODULES)[not windowed.kernels]
        assert engine.runner.info.windowed == ((0, 1) if windowed.family == "mistral" else (0,))
        poison(engine)
        return engine

    return make


def expected(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            **options,
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def test_tokens_are_those_of_transformers_cold_warm_and_side_by_side(windowed: Windowed, serve: MakeEngine) -> None:
    engine = serve(num_blocks=256)
    cold, cached = engine.generate(windowed.asked, GREEDY)
    assert cold == windowed.wanted
    assert sum(cached) > 0  # of prompts that wait for one another
    warm, cached = engine.generate(windowed.asked, GREEDY)
    assert warm == windowed.wanted
    assert cached == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in windowed.asked]
    off, cached = engine.generate(windowed.asked, GREEDY, use_cache=False)
    assert off == windowed.wanted
    assert sum(cached) == 0
    stats = engine.stats()
    assert stats["window"]["released"] > 0
    assert stats["window"]["used"] == 0


def test_tokens_are_those_of_transformers_while_a_small_pool_evicts(windowed: Windowed, serve: MakeEngine) -> None:
    engine = serve(num_blocks=64, window_blocks=32, max_batch_tokens=16)
    hits = 0
    for _ in range(2):
        tokens, cached = engine.generate(windowed.asked, GREEDY)
        assert tokens == windowed.wanted
        hits += sum(cached)
    for prompt, answer in zip(windowed.asked, windowed.wanted, strict=True):
        for _ in range(2):
            tokens, cached = engine.generate([prompt], GREEDY)
            assert tokens == [answer]
        assert cached == [(len(prompt) - 1) // BLOCK * BLOCK]  # just computed, so all of it is there
        hits += sum(cached)
    stats = engine.stats()
    assert hits > 0
    assert stats["evictions"] > 0
    assert stats["window"]["evictions"] > 0
    assert stats["window"]["released"] > 0


def test_tokens_are_those_of_transformers_when_requests_are_preempted(windowed: Windowed, serve: MakeEngine) -> None:
    engine = serve(num_blocks=24, window_blocks=24, max_batch_tokens=8)
    hits = 0
    for _ in range(2):
        tokens, cached = engine.generate(windowed.asked, GREEDY)
        assert tokens == windowed.wanted
        hits += sum(cached)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["window"]["released"] > 0
    assert hits > 0


def test_tokens_are_those_of_transformers_when_window_blocks_are_scarce(windowed: Windowed, serve: MakeEngine) -> None:
    engine = serve(num_blocks=64, window_blocks=2 * SPAN, max_batch_tokens=32)
    tokens, _ = engine.generate(windowed.asked, GREEDY)
    assert tokens == windowed.wanted
    assert engine.stats()["window"]["evictions"] > len(windowed.asked)


def test_a_long_generation_holds_no_more_than_its_window(windowed: Windowed, serve: MakeEngine) -> None:
    engine = serve(num_blocks=64, window_blocks=SPAN, max_batch_tokens=16)
    windows = engine.core._blocks._windows
    assert windows is not None
    used = []
    execute = engine.runner.execute

    def watched(batch: Batch) -> list[ChunkResult]:
        used.append(windows.stats().used)
        return execute(batch)

    engine.runner.execute = watched  # type: ignore[method-assign]
    (tokens,), _ = engine.generate(windowed.asked[:1], msgspec.structs.replace(GREEDY, max_tokens=90))
    assert tokens == expected(windowed.model, windowed.asked[0], 90)
    assert max(used) == SPAN
    assert windows.stats().released >= 90 // BLOCK


def test_beams_are_those_of_transformers(windowed: Windowed, serve: MakeEngine) -> None:
    prompt, sampling = windowed.asked[0], Sampling(TOKENS, beam_width=3, ignore_eos=True, logprobs=0)
    best = expected(windowed.model, prompt, TOKENS, num_beams=3)
    roomy = serve(num_blocks=128)
    for engine in (roomy, roomy, serve(num_blocks=30, window_blocks=7, max_batch_tokens=6)):
        id = engine.submit(prompt, sampling, n=1)
        engine.run()
        assert [*engine.whole(id).token_ids] == best
    assert roomy.stats()["window"]["released"] > 0


def test_choices_are_what_requests_of_their_own_would_get(windowed: Windowed, serve: MakeEngine) -> None:
    prompt = windowed.asked[0]
    sampling = Sampling(TOKENS, temperature=1.0, seed=7, ignore_eos=True)
    roomy, tight = serve(num_blocks=128), serve(num_blocks=30, window_blocks=9, max_batch_tokens=8)
    alone, _ = roomy.generate(
        [prompt] * 3,
        [msgspec.structs.replace(sampling, seed=choice_seed(7, index)) for index in range(3)],
        use_cache=False,
    )
    assert len({tuple(tokens) for tokens in alone}) == 3
    for engine in (roomy, roomy, tight, tight):
        assert engine.choices(prompt, sampling, 3) == alone
    assert tight.stats()["window"]["released"] > 0


def test_the_pool_takes_the_bytes_of_both_kinds_of_blocks(windowed: Windowed, model_engine: MakeEngine) -> None:
    runner = model_engine(windowed.folder, num_blocks=64, window_blocks=24, block_size=BLOCK).runner
    held = sum(tensor.nbytes for tensor in (*runner._pool.keys, *runner._pool.values))
    full, window = (
        kv_bytes_per_block(layers, torch.float32, BLOCK)
        for layers in (runner.info.full_layers, runner.info.windowed_layers)
    )
    assert held == 64 * full + 24 * window
    assert full + window == kv_bytes_per_block(runner.info.layers, torch.float32, BLOCK)
