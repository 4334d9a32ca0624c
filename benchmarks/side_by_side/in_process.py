"""The engine without a server around it, in this process: its steps, its first token and what is not the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
from tokenizers import Tokenizer

from benchmarks.side_by_side.limits import split
from benchmarks.side_by_side.workload import OUTPUT_TOKENS
from cache_policy.keys import token_bytes
from engine.batch import Batch, Chunk, ChunkResult
from engine.core import EngineCore
from engine.detokenize import IncrementalDetokenizer
from engine.errors import EngineError
from engine.native.build import build_kernels, compiler
from engine.native.library import Kernels
from engine.runner import ModelRunner
from engine.wire import EngineInfo, Sampling, Submit

__all__ = ["FirstToken", "InProcessEngine", "StepTime"]

_POOL_BLOCKS: Final = 2048
_BLOCK_SIZE: Final = 16
_ROOT: Final = b"side-by-side-run"
_DECODES_AFTER: Final = 8  # steps that the first token is compared with


class StepTime(msgspec.Struct, frozen=True):
    """One step of the engine: its tokens, its seconds, and how many of them the model took."""

    prefill_tokens: int
    decode_tokens: int
    seconds: float
    model_seconds: float


class FirstToken(msgspec.Struct, frozen=True):
    """From submission to the first token, and one decode step behind it, both in seconds; tokens that were cached."""

    seconds: float
    decode_seconds: float
    prompt_tokens: int
    cached_tokens: int


class InProcessEngine:
    """A model runner, and a core that serves requests with it, each on blocks of its own in one pool.

    Owns the pool. Everything runs in the caller's thread, arithmetic on torch's.
    """

    def __init__(
        self, folder: Path, *, dtype: str = "auto", max_batch_tokens: int = 512, batch: int = 16, context: int = 1200
    ) -> None:
        """Load the model; steps of up to ``batch`` sequences, contexts of up to ``context`` tokens can be timed."""
        self.kernels = Kernels(build_kernels()) if compiler() else None
        self._runner = ModelRunner(
            folder, dtype=dtype, num_blocks=_POOL_BLOCKS, block_size=_BLOCK_SIZE, kernels=lambda: self.kernels
        )
        self.method, self.dtype = self._runner.method, self._runner.dtype
        self.packed_bytes = self._runner.packed_bytes
        self.max_batch_tokens = max_batch_tokens
        model = self._runner.info
        self._vocabulary = model.vocab_size
        # The last blocks of the pool are for steps that are timed alone; the core does not know them.
        per_sequence = -(-(context + 1) // _BLOCK_SIZE)
        first = _POOL_BLOCKS - batch * per_sequence
        self._tables = [list(range(first + i * per_sequence, first + (i + 1) * per_sequence)) for i in range(batch)]
        self._filled = [0] * batch
        info = EngineInfo(
            model=folder.name,
            root=str(folder),
            fingerprint=self._runner.fingerprint,
            boot_id="side by side",
            max_model_len=min(model.max_positions, first * _BLOCK_SIZE),
            num_blocks=first,
            block_size=_BLOCK_SIZE,
            dtype=self.dtype,
            device=self._runner.device,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            policy="lru",
            max_batch_tokens=max_batch_tokens,
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._timed = _TimedRunner(self._runner)
        self._core = EngineCore(
            self._timed, info, detokenizer=partial(IncrementalDetokenizer, self.tokenizer), max_running=32
        )
        self._next_id = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def prefill_seconds(self, tokens: int) -> float:
        """Compute a prompt that nothing is cached of, in the largest chunks, and sample its next token."""
        started = time.perf_counter()
        start = 0
        for count in split(tokens, self.max_batch_tokens):
            self._runner.execute(Batch([self._chunk(0, start, count, sample=start + count == tokens)]))
            start += count
        self._filled[0] = max(self._filled[0], tokens)
        return time.perf_counter() - started

    def decode_seconds(self, batch: int, context: int, repeats: int) -> float:
        """The median of ``repeats`` decode steps of ``batch`` sequences, each with ``context`` tokens before it."""
        for sequence in range(batch):
            start = self._filled[sequence]
            for count in split(max(0, context - start), self.max_batch_tokens):
                self._runner.execute(Batch([self._chunk(sequence, start, count, sample=False)]))
                start += count
            self._filled[sequence] = start
        step = Batch([self._chunk(sequence, context, 1, sample=True) for sequence in range(batch)])
        self._runner.execute(step)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            self._runner.execute(step)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def first_token(self, text: str) -> FirstToken:
        """Serve one prompt alone, and a few tokens after its first."""
        tokens = self.tokenizer.encode(text).ids
        started = time.perf_counter()
        self._submit(tokens, 1 + _DECODES_AFTER)
        seconds: float | None = None
        cached = 0
        decodes = []
        while self._core.has_work():
            before = time.perf_counter()
            report = self._core.step()
            now = time.perf_counter()
            if report is None or not report.outputs:
                continue
            if seconds is None:
                seconds, cached = now - started, report.outputs[0].cached_tokens or 0
            else:
                decodes.append(now - before)
        if seconds is None:
            raise EngineError("a request ended without a token")
        return FirstToken(seconds, statistics.median(decodes), len(tokens), cached)

    def closed_loop(self, texts: Sequence[str], concurrency: int) -> Iterator[StepTime]:
        """Serve all prompts with ``concurrency`` of them at a time; one item per step."""
        waiting = [self.tokenizer.encode(text).ids for text in reversed(texts)]
        for _ in range(min(concurrency, len(waiting))):
            self._submit(waiting.pop(), OUTPUT_TOKENS)
        while self._core.has_work():
            self._timed.seconds = 0.0
            started = time.perf_counter()
            report = self._core.step()
            seconds = time.perf_counter() - started
            if report is None:
                continue
            for output in report.outputs:
                if output.error is not None:
                    raise EngineError(output.error[1])
                if output.finish_reason is not None and waiting:
                    self._submit(waiting.pop(), OUTPUT_TOKENS)
            if report.timing is not None:
                timing = report.timing
                yield StepTime(timing.prefill_tokens, timing.decode_tokens, seconds, self._timed.seconds)

    def _submit(self, tokens: list[int], max_tokens: int) -> None:
        greedy = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._core.submit(Submit(self._next_id, token_bytes(tokens), _ROOT, greedy))
        self._next_id += 1

    def _chunk(self, sequence: int, start: int, count: int, *, sample: bool) -> Chunk:
        # Other tokens in each place, so that no two sequences are the same.
        tokens = [
            (7919 * (position + 31 * sequence) + 1) % self._vocabulary for position in range(start, start + count)
        ]
        greedy = Sampling(max_tokens=1, temperature=0.0)
        return Chunk(sequence, tokens, start, self._tables[sequence], sample, greedy, seed=0, output_index=0)


class _TimedRunner:
    """A runner that adds up the seconds it takes."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def execute(self, batch: Batch) -> list[ChunkResult]:
        started = time.perf_counter()
        try:
            return self._runner.execute(batch)
        finally:
            self.seconds += time.perf_counter() - started
