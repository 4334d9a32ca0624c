"""A model served over the Triton back end gives transformers' own greedy tokens, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=9, attn_logit_softcapping=2.0, query_pre_attn_scalar=4),
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it exists for Linux only)"
)


def test_models_over_the_triton_kernels_are_token_equal(tiny_model: Callable[..., tuple[Any, Path]]) -> None:
    rng = random.Random(5)
    shared = [rng.randrange(3, 211) for _ in range(16)]
    prompts = [shared + [rng.randrange(3, 211) for _ in range(count)] for count in (9, 1, 30)]
    models = {name: tiny_model(config, name) for name, config in CONFIGS.items()}
    answers = subprocess.run(
        [
            sys.executable,
            str(HERE / "triton_model.py"),
            json.dumps(prompts),
            *(str(folder) for _, folder in models.values()),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), *sys.path))},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.splitlines()
    for line, (model, _) in zip(answers, models.values(), strict=True):
        method, cold, warm, cached, released = json.loads(line)
        assert method.endswith("attention triton")
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.generation_config.eos_token_id = None
            with torch.inference_mode():
                whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
            expected.append(whole[0, len(prompt) :].tolist())
        assert cold == expected
        assert warm == expected
        assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        assert (released > 0) == (model.config.model_type == "gemma2")
