"""With the C++ kernels a token's logits are the same bits however its context was computed, and next to whatever."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import Batch, Chunk
from engine.native.library import Kernels
from engine.runner import ModelRunner
from engine.wire import Sampling

from .conftest import SMALL, VOCABULARY

MakeModel = Callable[..., tuple[Any, Path]]

BLOCK = 16
LENGTH = 300  # more than two groups of keys
SHAPE = SMALL | {
    "hidden_size": 42,
    "intermediate_size": 212,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "mistral-window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=150),
}


@pytest.fixture(autouse=True)
def two_threads(kernels: Kernels) -> Iterator[None]:
    kernels.use_threads(2)
    yield
    kernels.use_threads(torch.get_num_threads())


@pytest.fixture(params=CONFIGS)
def runner(request: pytest.FixtureRequest, tiny_model: MakeModel, kernels: Kernels) -> ModelRunner:
    _, folder = tiny_model(CONFIGS[request.param]())
    runner = ModelRunner(folder, dtype="float32", num_blocks=128, block_size=BLOCK, kernels=lambda: kernels)
    assert runner.method.startswith("lean forward (kernels)")
    return runner


class Watched:
    """Runs chunks of one sequence, next to others, and keeps its logits."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        compute = runner._compute

        def watched(*arguments: Any) -> torch.Tensor:
            logits = compute(*arguments)
            self._logits = logits.clone()
            return logits

        runner._compute = watched  # type: ignore[method-assign]

    def run(self, chunk: Chunk, before: Sequence[Chunk] = (), after: Sequence[Chunk] = ()) -> torch.Tensor:
        self._runner.execute(Batch([*before, chunk, *after]))
        return self._logits[sum(other.sample for other in before)]

    def prefill(self, tokens: list[int], cuts: Sequence[int], table: list[int]) -> torch.Tensor:
        for start, end in pairwise((0, *cuts)):
            logits = self.run(part(tokens, start, end, table))
        return logits


def part(tokens: list[int], start: int, end: int, table: list[int]) -> Chunk:
    return Chunk(1, tokens[start:end], start, table, True, Sampling(1, temperature=0.0), 0, 0, window_table=table)


def some_tokens(seed: int, count: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def test_logits_do_not_depend_on_the_chunks_of_the_context(runner: ModelRunner) -> None:
    watched, tokens = Watched(runner), some_tokens(1)
    whole = watched.prefill(tokens, [LENGTH], list(range(19)))
    for cuts in ([128, LENGTH], [1, 2, 60, 299, LENGTH], [*range(7, LENGTH, 7), LENGTH], [*range(150, LENGTH), LENGTH]):
        assert torch.equal(watched.prefill(tokens, cuts, list(range(30, 49))), whole)


def test_logits_do_not_depend_on_what_else_is_in_the_batch(runner: ModelRunner) -> None:
    watched, tokens, table = Watched(runner), some_tokens(1), list(range(19))
    alone = watched.prefill(tokens, [LENGTH - 1, LENGTH], table)
    newest = part(tokens, LENGTH - 1, LENGTH, table)
    prompt = part(some_tokens(2, 90), 0, 90, list(range(20, 26)))
    watched.prefill(some_tokens(3), [200], list(range(30, 43)))
    decodes = [part(some_tokens(3), at, at + 1, list(range(30, 43))) for at in (20, 130, 199)]
    for before, after in (([], [prompt]), (decodes, []), ([prompt, *decodes], decodes[:1])):
        assert torch.equal(watched.run(newest, before, after), alone)


def test_logits_do_not_depend_on_whether_a_prefix_is_shared(runner: ModelRunner) -> None:
    watched, tokens = Watched(runner), some_tokens(1)
    alone = watched.prefill(tokens, [LENGTH - 1, LENGTH], list(range(19)))
    newest = part(tokens, LENGTH - 1, LENGTH, list(range(19)))
    for shared in (9, 17):  # blocks: one group of keys, and two
        other = tokens[: shared * BLOCK] + some_tokens(4)
        table = list(range(shared)) + list(range(40, 50))
        watched.run(part(other, shared * BLOCK, shared * BLOCK + 20, table))
        decode = part(other, shared * BLOCK + 20, shared * BLOCK + 21, table)
        assert torch.equal(watched.run(newest, [decode], [decode]), alone)


def test_logits_do_not_depend_on_the_number_of_threads(runner: ModelRunner, kernels: Kernels) -> None:
    watched, tokens = Watched(runner), some_tokens(1)
    two = watched.prefill(tokens, [170, LENGTH], list(range(19)))
    for threads in (1, 3):
        kernels.use_threads(threads)
        assert torch.equal(watched.prefill(tokens, [170, LENGTH], list(range(19))), two)
