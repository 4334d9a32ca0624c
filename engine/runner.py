"""Computes a scheduler's batches with an unchanged transformers model over the paged KV pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from engine.allocator import keep_freed_memory
from engine.attention.backend import (
    ATTENTION_NAME,
    AttentionBackend,
    KvPool,
    LayerOptions,
    LayerShape,
    SequenceSlice,
    StepAttention,
)
from engine.attention.torch_cpu import TorchCpuAttention
from engine.batch import Batch, Chunk
from engine.errors import UnsupportedModelError
from engine.models.loading import load_model, read_model_info, resolve_dtype, weights_fingerprint
from engine.sampling import sample
from engine.wire import Sampling, StepTiming

__all__ = ["ModelRunner"]

_PROOF_TOKENS: Final = 40
_PROOF_ERROR: Final = {"float32": 1e-3, "bfloat16": 0.2}
"""Norm of the difference to the expected logits, relative to theirs: rounding stays far below, a fault far above."""
_PROFILE_SECONDS: Final = 3.0
# Prefill tokens, tokens before them, and decodes at that context: enough to tell the cost of a step, of a token and
# of context apart.
_PROFILE_STEPS: Final = ((16, 0, 0), (128, 0, 0), (0, 256, 1), (256, 0, 0), (0, 256, 8), (128, 896, 0), (512, 0, 0))


class ModelRunner:
    """The ``engine.batch.Runner`` with a real model. Owns the weights and the KV pool; one thread calls it.

    ``info`` says what is served, ``dtype`` and ``device`` where and in which precision, ``fingerprint`` with which
    weights. At start it proves on a short text that the model with our attention gives the logits that it gives with
    its own, so that a model whose attention does more than we know is refused instead of served wrongly.
    """

    device = "cpu"

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "auto",
        num_blocks: int,
        block_size: int = 16,
        threads: int = 0,
        backend: AttentionBackend | None = None,
    ) -> None:
        """Load the model of a Hugging Face folder.

        Args:
            folder: configuration, tokenizer and safetensors.
            dtype: ``auto``, ``float32`` or ``bfloat16``.
            num_blocks: size of the KV pool.
            block_size: tokens per block.
            threads: for arithmetic; 0 leaves it to torch. Like the allocator's it is a setting of the whole process.
            backend: how attention is computed; the CPU's own by default.

        Raises:
            ModelError: the folder cannot be loaded.
            UnsupportedModelError: the model cannot be served exactly.
        """
        if threads:
            torch.set_num_threads(threads)
        self.info = read_model_info(folder)
        torch_dtype = resolve_dtype(dtype)
        self.dtype = str(torch_dtype).removeprefix("torch.")
        self.fingerprint = weights_fingerprint(folder)
        self._backend = backend or TorchCpuAttention()
        self._model = load_model(self.info, torch_dtype)
        keep_freed_memory()
        self._pool = KvPool(self.info.layers, num_blocks, block_size, torch_dtype)
        self._prove()

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[int | None]:
        """See ``engine.batch.Runner``."""
        logits = self._forward(batch.chunks)
        sampled = [chunk for chunk in batch.chunks if chunk.sample]
        tokens = iter(sample(logits, sampled, self.info.eos_token_ids) if sampled else ())
        return [next(tokens) if chunk.sample else None for chunk in batch.chunks]

    def profile(self) -> tuple[StepTiming, ...]:
        """Time a few steps, in about three seconds at most. Overwrites blocks: call it before anything is served."""
        timings: list[StepTiming] = []
        deadline = time.perf_counter() + _PROFILE_SECONDS
        for prefill, context, decodes in _PROFILE_STEPS:
            chunks = self._profile_chunks(prefill, context, decodes)
            if not chunks or (timings and time.perf_counter() > deadline):
                continue
            started = time.perf_counter()
            self.execute(Batch(chunks))
            seconds = time.perf_counter() - started
            timings.append(
                StepTiming(
                    prefill, prefill * context + prefill * (prefill - 1) // 2, decodes, decodes * context, seconds
                )
            )
        return tuple(timings)

    # --- inside ----------------------------------------------------------------------------------------

    def _forward(self, chunks: Sequence[Chunk], backend: AttentionBackend | None = None) -> torch.Tensor:
        """Compute the chunks as one flat batch; logits ``[sampled chunks, vocabulary]``."""
        token_ids: list[int] = []
        positions: list[int] = []
        slices: list[SequenceSlice] = []
        rows: list[int] = []
        for chunk in chunks:
            length = len(chunk.tokens)
            slices.append(SequenceSlice(len(token_ids), length, chunk.start, chunk.block_table))
            token_ids += chunk.tokens
            positions += range(chunk.start, chunk.start + length)
            if chunk.sample:
                rows.append(len(token_ids) - 1)
        output = self._model(
            input_ids=torch.tensor([token_ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.long),
            paged=(backend or self._backend).begin(self._pool, slices),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _prove(self) -> None:
        """Compute a short text with the model's own attention and with ours, and compare; then ours stays in place."""
        size = self._pool.block_size
        count = min(_PROOF_TOKENS, self.info.max_positions, self._pool.num_blocks * size)
        token_ids = self._any_tokens(count)
        table = list(range(-(-count // size)))
        cuts = sorted({0, count // 2, count - 1, count})
        recorder = _RecordingBackend(self._backend, self.info.layers)
        try:
            expected = self._model(input_ids=torch.tensor([token_ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
            self._model.set_attn_implementation(ATTENTION_NAME)
            for start, end in pairwise(cuts):
                chunk = _chunk(token_ids[start:end], start, table, sample=end == count)
                logits = self._forward([chunk], recorder)
        except TypeError as error:
            raise UnsupportedModelError(f"{self.info.architecture} cannot be called as needed: {error}") from error
        self._judge(recorder, logits[0].float(), expected.float())

    def _judge(self, recorder: _RecordingBackend, logits: torch.Tensor, expected: torch.Tensor) -> None:
        reason = None
        silent = [layer for layer in range(len(self.info.layers)) if layer not in recorder.windows]
        if silent:
            reason = f"its layers {silent} never stored K and V"
        elif recorder.windows != dict(enumerate(self.info.windows)):
            reason = "its layers attend in other windows than its configuration says"
        else:
            error = float((logits - expected).norm() / (expected - expected.mean()).norm())
            if not error < _PROOF_ERROR[self.dtype]:
                reason = f"its output with paged attention differs by {error:.2g} from its own"
        if reason is not None:
            raise UnsupportedModelError(f"{self.info.architecture} cannot be served exactly: {reason}.")

    def _any_tokens(self, count: int) -> list[int]:
        return [(7919 * i + 1) % self.info.vocab_size for i in range(count)]

    def _profile_chunks(self, prefill: int, context: int, decodes: int) -> list[Chunk]:
        """The chunks of one step to be timed, each in blocks of its own; none when they do not fit."""
        length = prefill or 1
        sequences = decodes or 1
        blocks = -(-(context + length) // self._pool.block_size)
        if blocks * sequences > self._pool.num_blocks or context + length > self.info.max_positions:
            return []
        tokens = self._any_tokens(length)
        tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(sequences)]
        return [_chunk(tokens, context, table, sample=True) for table in tables]


class _RecordingBackend:
    """Passes everything on, and notes which layers attended in which window; refuses K and V of unforeseen shape."""

    name = "recording"

    def __init__(self, backend: AttentionBackend, layers: Sequence[LayerShape]) -> None:
        self._backend = backend
        self.layers = layers
        self.windows: dict[int, int | None] = {}

    def begin(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> _RecordingStep:
        return _RecordingStep(self, self._backend.begin(pool, slices))


class _RecordingStep:
    def __init__(self, recorder: _RecordingBackend, step: StepAttention) -> None:
        self._recorder = recorder
        self._step = step

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        shape = LayerShape(key.shape[0], key.shape[-1], value.shape[-1])
        if shape != self._recorder.layers[layer]:
            raise UnsupportedModelError(
                f"layer {layer} stores {shape}, by its configuration {self._recorder.layers[layer]}"
            )
        self._recorder.windows[layer] = options.sliding_window
        return self._step.attend(layer, query, key, value, options)


def _chunk(tokens: list[int], start: int, block_table: list[int], *, sample: bool) -> Chunk:
    greedy = Sampling(max_tokens=1, temperature=0.0)
    return Chunk(0, tokens, start, block_table, sample, greedy, seed=0, output_index=0)
