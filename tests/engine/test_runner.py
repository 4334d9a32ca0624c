"""The runner with tiny models of many families: the tokens are transformers', whatever is cached, cut or evicted."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from engine.attention.backend import KvPool, LayerOptions, SequenceSlice
from engine.attention.reference import ReferenceAttention
from engine.batch import Batch, Chunk, ChunkResult
from engine.errors import ModelError, UnsupportedModelError
from engine.models.loading import (
    kv_bytes_per_block,
    read_model_info,
    resolve_dtype,
    resolve_kv_dtype,
    weights_fingerprint,
)
from engine.runner import ModelRunner
from engine.wire import Sampling

from .conftest import SMALL, VOCABULARY

TOKENS = 14
GREEDY = Sampling(TOKENS, temperature=0.0, ignore_eos=True)

MakeModel = Callable[..., tuple[Any, Path]]
MakeEngine = Callable[..., Any]

WIDE = SMALL | {"head_dim": 16}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def llama() -> PreTrainedConfig:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return transformers.LlamaConfig(**WIDE, rope_parameters=rope)


def gemma2(**changes: Any) -> PreTrainedConfig:
    values = {"sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    return transformers.Gemma2Config(**(WIDE | {"query_pre_attn_scalar": 16} | values | changes))


def gemma3(**changes: Any) -> PreTrainedConfig:
    values = {"sliding_window": 9, "layer_types": MIXED, "query_pre_attn_scalar": 16}
    return transformers.Gemma3TextConfig(**(WIDE | values | changes))


def gpt_oss(**changes: Any) -> PreTrainedConfig:
    values = {"sliding_window": 9, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.GptOssConfig(**(WIDE | values | {"rope_parameters": PLAIN_ROPE} | changes))


def gpt2() -> PreTrainedConfig:
    special = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=160, **special)


def deepseek() -> PreTrainedConfig:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    sizes = {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return transformers.DeepseekV3Config(**(SMALL | sizes), **experts, **latent, rope_parameters=PLAIN_ROPE)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "qwen2": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=9, layer_types=list(reversed(MIXED[:2])) + MIXED[:1]
    ),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE),
    "mistral": lambda: transformers.MistralConfig(**WIDE, sliding_window=11),
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "gpt-oss": gpt_oss,
    "phi3": lambda: transformers.Phi3Config(**SMALL, sliding_window=11),
    "deepseek-v3": deepseek,
}


def some_prompts(lengths: Sequence[int] = (1, 18, 43), shared: int = 0) -> list[list[int]]:
    rng = random.Random(1)
    prefix = [rng.randrange(3, VOCABULARY) for _ in range(shared)]
    return [prefix + [rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def by_transformers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of ``generate`` with transformers' own attention and cache, one prompt at a time."""
    model.generation_config.eos_token_id = None
    return [
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=TOKENS, do_sample=False
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_what_transformers_generates(
    family: str, tiny_model: MakeModel, model_engine: MakeEngine
) -> None:
    model, folder = tiny_model(FAMILIES[family]())
    prompts = some_prompts(shared=9)
    expected = by_transformers(model, prompts)
    assert len(set().union(*expected)) > 8  # a model stuck on one token would prove nothing

    roomy = model_engine(folder)
    assert roomy.generate(prompts, GREEDY, use_cache=False)[0] == expected
    cold, cached = roomy.generate(prompts, GREEDY)
    assert cold == expected
    assert cached[0] == 0
    warm, cached = roomy.generate(prompts, GREEDY)
    assert warm == expected
    assert cached == [(len(prompt) - 1) // 4 * 4 for prompt in prompts]

    tight = model_engine(folder, num_blocks=24, max_batch_tokens=7)
    for _ in range(2):
        assert tight.generate(prompts, GREEDY)[0] == expected
    assert tight.load.evictions > 0
    assert tight.load.preemptions > 0


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        (gemma2(), gemma2(attn_logit_softcapping=None)),
        (gemma2(), gemma2(sliding_window=150)),
        (gemma3(), gemma3(sliding_window=150)),
        (FAMILIES["mistral"](), transformers.MistralConfig(**WIDE, sliding_window=None)),
    ],
    ids=["softcap", "gemma2-window", "gemma3-window", "mistral-window"],
)
def test_a_feature_left_out_would_be_noticed(
    config: PreTrainedConfig, changed: PreTrainedConfig, tiny_model: MakeModel
) -> None:
    model, _ = tiny_model(config)
    other = type(model)(changed).eval()
    other.load_state_dict(model.state_dict())
    prompts = some_prompts(shared=9)
    assert by_transformers(other, prompts) != by_transformers(model, prompts)


def test_sinks_left_out_would_be_noticed(tiny_model: MakeModel) -> None:
    model, _ = tiny_model(gpt_oss())
    prompts = some_prompts(shared=9)
    expected = by_transformers(model, prompts)
    without = copy.deepcopy(model)
    for layer in without.model.layers:
        layer.self_attn.sinks.data.fill_(float("-inf"))
    assert by_transformers(without, prompts) != expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), "positions"),
        (
            lambda: transformers.FalconConfig(
                vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
            ),
            "does not let its attention be replaced",
        ),
        (
            lambda: transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
            "linear_attention",
        ),
        (lambda: transformers.Llama4TextConfig(**WIDE), "chunked_attention"),
        (
            lambda: transformers.Gemma3nTextConfig(
                **WIDE, num_kv_shared_layers=1, vocab_size_per_layer_input=VOCABULARY
            ),
            "share their K and V",
        ),
        (
            lambda: transformers.LlamaConfig(
                **SMALL, rope_parameters=PLAIN_ROPE | {"rope_type": "dynamic", "factor": 4.0}
            ),
            "dynamic",
        ),
    ],
    ids=["bloom", "falcon", "mamba", "llama4", "gemma3n", "dynamic-rope"],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(
    config: Callable[[], PreTrainedConfig], reason: str, tiny_model: MakeModel
) -> None:
    _, folder = tiny_model(config())
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4)


class _Wrong(ReferenceAttention):
    """Correct but for one change to what it is told."""

    def __init__(self, change: Callable[[LayerOptions], LayerOptions]) -> None:
        self._change = change

    def begin(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> Any:
        step, change = super().begin(pool, slices), self._change

        class Step:
            def attend(self, layer: int, query: Any, key: Any, value: Any, options: LayerOptions) -> torch.Tensor:
                return step.attend(layer, query, key, value, change(options))

        return Step()


@pytest.mark.parametrize(
    "change",
    [
        lambda options: LayerOptions(options.scaling * 1.05, options.sliding_window, options.softcap),
        lambda options: LayerOptions(options.scaling, None, options.softcap),
        lambda options: LayerOptions(options.scaling, options.sliding_window, None),
    ],
    ids=["scaling", "window", "softcap"],
)
def test_an_attention_that_is_not_the_models_own_is_noticed_at_load(
    change: Callable[[LayerOptions], LayerOptions], tiny_model: MakeModel
) -> None:
    _, folder = tiny_model(gemma2())
    ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4, backend=_Wrong(lambda options: options))
    with pytest.raises(UnsupportedModelError, match="differs"):
        ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4, backend=_Wrong(change))


def test_a_layer_that_never_stores_k_and_v_is_noticed_at_load(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = tiny_model(llama())
    forward = transformers.models.llama.modeling_llama.LlamaAttention.forward

    def skip_second(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return (hidden_states, None) if self.layer_idx == 1 else forward(self, hidden_states, **kwargs)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", skip_second)
    with pytest.raises(UnsupportedModelError, match=r"layers \[1\] never stored"):
        ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4)


def test_j1_a_seeded_request_gets_its_tokens_in_any_company(tiny_model: MakeModel, model_engine: MakeEngine) -> None:
    _, folder = tiny_model(llama())
    engine = model_engine(folder, num_blocks=400, max_running=16)
    mine = some_prompts((19,))[0]
    seeded = Sampling(TOKENS, temperature=1.0, seed=42, ignore_eos=True)
    alone = engine.generate([mine], seeded)[0][0]
    rng = random.Random(3)
    for _ in range(4):
        others = some_prompts([rng.randrange(1, 30) for _ in range(11)])
        kinds = [Sampling(TOKENS, temperature=1.0, seed=rng.choice([None, 1, 7]), ignore_eos=True) for _ in others]
        at = rng.randrange(len(others) + 1)
        prompts, sampling = [*others[:at], mine, *others[at:]], [*kinds[:at], seeded, *kinds[at:]]
        assert engine.generate(prompts, sampling)[0][at] == alone
    different = Sampling(TOKENS, temperature=1.0, seed=43, ignore_eos=True)
    assert engine.generate([mine], different)[0][0] != alone
    unseeded = Sampling(TOKENS, temperature=1.0, ignore_eos=True)
    assert engine.generate([mine], unseeded)[0] != engine.generate([mine], unseeded)[0]


def test_only_chunks_that_ask_for_a_token_get_one(tiny_model: MakeModel) -> None:
    _, folder = tiny_model(llama())
    runner = ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4)
    greedy = Sampling(4, temperature=0.0)
    first = Chunk(1, [5, 6, 7], 0, [3, 4], False, greedy, 0, 0)
    second = Chunk(2, [8, 9], 0, [7], True, greedy, 0, 0)
    results = runner.execute(Batch([first, second]))
    assert results[0] == ChunkResult()
    assert results[1].token in range(VOCABULARY)
    assert runner.execute(Batch([first])) == [ChunkResult()]
    assert runner.execute(Batch([second])) == results[1:]


def test_end_of_sequence_waits_for_min_tokens(tiny_model: MakeModel) -> None:
    model, folder = tiny_model(llama())
    chunk = Chunk(1, [5, 6, 7], 0, [3], True, Sampling(4, temperature=0.0, min_tokens=1), 0, 0)
    free = ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4)
    (ending,) = [result.token for result in free.execute(Batch([chunk]))]
    model.generation_config.eos_token_id = [2, ending]
    model.generation_config.save_pretrained(folder)
    held = ModelRunner(folder, dtype="float32", num_blocks=16, block_size=4)
    assert held.info.eos_token_ids == (2, ending)
    assert held.execute(Batch([chunk]))[0].token != ending


def test_a_block_takes_the_bytes_that_were_announced(tiny_model: MakeModel) -> None:
    for config in (gemma2(), deepseek()):
        _, folder = tiny_model(config, name=config.model_type)
        for dtype in ("float32", "bfloat16"):
            runner = ModelRunner(folder, dtype=dtype, num_blocks=16, block_size=4)
            allocated = sum(tensor.nbytes for tensor in (*runner._pool.keys, *runner._pool.values))
            assert allocated == 16 * kv_bytes_per_block(runner.info.layers, resolve_dtype(dtype), 4)


def test_the_profile_counts_what_its_steps_computed(tiny_model: MakeModel) -> None:
    _, folder = tiny_model(llama())
    steps = ModelRunner(folder, dtype="float32", num_blocks=64, block_size=4).profile()
    assert (16, 120, 0, 0) in [(s.prefill_tokens, s.prefill_context, s.decode_tokens, s.decode_context) for s in steps]
    assert all(step.seconds > 0 for step in steps)
    assert ModelRunner(folder, dtype="float32", num_blocks=1, block_size=4).profile() == ()


def test_the_fingerprint_tells_weights_apart(tiny_model: MakeModel, tmp_path: Path) -> None:
    model, folder = tiny_model(llama())
    same = shutil.copytree(folder, tmp_path / "copy")
    assert weights_fingerprint(same) == weights_fingerprint(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(tmp_path / "tuned")
    assert weights_fingerprint(tmp_path / "tuned") != weights_fingerprint(folder)


def test_a_folder_says_what_is_wrong_with_it(tiny_model: MakeModel) -> None:
    model, folder = tiny_model(llama())
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        ModelRunner(folder, dtype="float32", num_blocks=4, block_size=4)
    tensors = dict(model.state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are missing, the first is model\.layers\.1\.mlp\.up_proj"):
        ModelRunner(folder, dtype="float32", num_blocks=4, block_size=4)
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        read_model_info(folder)
    with pytest.raises(ModelError, match="unknown dtype"):
        resolve_dtype("int4")
    with pytest.raises(ModelError, match="int8 is for the CPU"):
        resolve_kv_dtype("int8", torch.bfloat16, "cuda:0")
    assert resolve_dtype("auto") in (torch.float32, torch.bfloat16)
