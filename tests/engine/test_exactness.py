"""The main promise, on the default model in float32: greedy tokens are those of ``transformers.generate``.

With the cache off, cold, warm, cut into chunks, and while a small pool evicts; one half with the C++ kernels (where
there is a compiler), the other by PyTorch alone. CI takes a few prompts;
``HEADSTART_EXACTNESS_PROMPTS=100`` runs as many as that, of 20 to 1,500 tokens.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.models.catalog import DEFAULT_MODEL, ensure_model
from engine.native.build import compiler
from engine.wire import Sampling

COUNT = int(os.environ.get("HEADSTART_EXACTNESS_PROMPTS", "5"))
pytestmark = [pytest.mark.model, pytest.mark.timeout(600 if COUNT <= 5 else 0)]
TOKENS = 12 if COUNT <= 5 else 16
GREEDY = Sampling(TOKENS, temperature=0.0, ignore_eos=True)
SYSTEM_TOKENS = 48
BLOCK = 16


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Text of Python's own documentation: a system prompt that all share, then passages that some share.

    Lengths are spread evenly in their logarithm between 20 and 1,500 tokens, both included. Two have little in
    common and together are longer than a pool for the longest, which has to evict one for the other.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    modules = (argparse, inspect, json, logging, random, re, subprocess)
    texts = [inspect.getdoc(member) or "" for module in modules for _, member in inspect.getmembers(module)]
    passages = [tokenizer.encode("\n\n" + text).ids for text in texts if len(text) > 200]
    system = tokenizer.encode(inspect.getdoc(str) or "").ids[:SYSTEM_TOKENS]
    rng = random.Random(7)
    made = []
    for i in range(COUNT):
        length = (20, 1500, 400)[i] if i < 3 else round(20 * 75 ** rng.random())
        tokens = list(system)
        while len(tokens) < length:
            # Few passages, some much more often than others, so that prompts meet in the cache; every other prompt
            # takes them from the other end.
            drawn = min(int(rng.expovariate(0.7)), len(passages) - 1)
            tokens += passages[drawn if i % 2 else -1 - drawn]
        made.append(tokens[:length])
    return made


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


def test_a_roomy_pool_is_exact_without_cache_cold_and_warm(
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    model_engine: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    kernels = request.getfixturevalue("kernels") if compiler() else None
    blocks = sum(-(-(len(prompt) + TOKENS) // BLOCK) for prompt in prompts)
    engine = model_engine(
        folder,
        num_blocks=blocks,
        block_size=BLOCK,
        max_batch_tokens=512,
        threads=torch.get_num_threads(),
        kernels=lambda: kernels,
    )
    assert engine.runner.method.startswith("lean forward (kernels)" if kernels else "lean forward (torch)")
    off, cached = engine.generate(prompts, GREEDY, use_cache=False)
    assert off == expected
    assert set(cached) == {0}
    cold, cached = engine.generate(prompts, GREEDY)
    assert cold == expected
    assert cached[0] == 0
    warm, cached = engine.generate(prompts, GREEDY)
    assert warm == expected
    assert cached == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    assert engine.load.evictions == 0


def test_a_small_pool_that_evicts_is_exact_in_small_chunks(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], model_engine: Callable[..., Any]
) -> None:
    longest = max(len(prompt) for prompt in prompts)
    engine = model_engine(
        folder,
        num_blocks=-(-(longest + TOKENS) // BLOCK) + 8,
        block_size=BLOCK,
        max_batch_tokens=200,
        threads=torch.get_num_threads(),
    )
    tokens, cached = engine.generate(prompts, GREEDY)
    assert tokens == expected
    assert sum(cached) >= SYSTEM_TOKENS
    assert engine.load.evictions > 0
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    again, cached = engine.generate([prompts[i] for i in order], GREEDY)
    assert again == [expected[i] for i in order]
    assert sum(cached) >= SYSTEM_TOKENS
