"""Several choices of one prompt on real models: what each gets is what a request of its own would have got."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.attention.backend import KvPool, LayerShape
from engine.sequence import choice_seed
from engine.wire import Sampling

TOKENS = 14
SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "lean": lambda: transformers.LlamaConfig(**SMALL),
    "modules": lambda: transformers.Gemma2Config(**SMALL, query_pre_attn_scalar=16, sliding_window=9),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("length", [1, 8, 22])
def test_d4_choices_are_what_requests_of_their_own_would_get(
    family: str,
    length: int,
    tiny_model: Callable[..., tuple[Any, Path]],
    model_engine: Callable[..., Any],
) -> None:
    engine = model_engine(tiny_model(CONFIGS[family]())[1], num_blocks=24)
    prompt = [(37 * i + 11) % 200 + 3 for i in range(length)]
    sampling = Sampling(TOKENS, temperature=1.0, seed=7, ignore_eos=True)
    alone, _ = engine.generate(
        [prompt] * 4,
        [Sampling(TOKENS, temperature=1.0, seed=choice_seed(7, index), ignore_eos=True) for index in range(4)],
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
