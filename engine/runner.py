"""Computes a scheduler's batches over the paged KV pool.

It does so with a lean forward where the model is of a family that we know in full, else with transformers' modules.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

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
from engine.attention.cpp_cpu import CppCpuAttention
from engine.attention.groups import begin_step
from engine.attention.selection import attention_backend
from engine.batch import Batch, Chunk, ChunkResult
from engine.errors import UnsupportedModelError
from engine.models.kernel_model import KernelModel
from engine.models.lean import LeanModel
from engine.models.lean_weights import lean_weights
from engine.models.loading import load_model, read_model_info, resolve_dtype, resolve_kv_dtype, weights_fingerprint
from engine.native.library import Kernels
from engine.sampling import Sampler
from engine.wire import Sampling, StepTiming

__all__ = ["ModelRunner"]

_log: Final = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepAttention], torch.Tensor]
"""Token ids, positions, rows to sample (see ``LeanModel.forward``) and the step's attention, to logits."""

_PROOF_TOKENS: Final = 40
_PROOF_ERROR: Final = {"float32": 1e-3, "bfloat16": 0.2}
"""Norm of the difference to the expected logits, relative to theirs: rounding stays far below, a fault far above."""
_PROFILE_SECONDS: Final = 3.0
# Prefill tokens, tokens before them, and decodes at that context: enough to tell the cost of a step, of a token and
# of context apart.
_PROFILE_STEPS: Final = ((16, 0, 0), (128, 0, 0), (0, 256, 1), (256, 0, 0), (0, 256, 8), (128, 896, 0), (512, 0, 0))


class ModelRunner:
    """The ``engine.batch.Runner`` with a real model. Owns the weights and the KV pool; one thread calls it.

    ``info`` says what is served, ``dtype``, ``kv_dtype`` and ``device`` in which precision and where, ``fingerprint``
    with which weights, ``method`` by which code, ``packed_bytes`` how large the kernels' weights are (None without
    kernels). At start it proves on a short text that the logits are those of the model with its own attention: what
    differs is not used, and when nothing is left the model is refused instead of served wrongly.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "auto",
        num_blocks: int,
        window_blocks: int = 0,
        block_size: int = 16,
        threads: int = 0,
        kv_dtype: str = "auto",
        backend: AttentionBackend | None = None,
        kernels: Callable[[], Kernels | None] | None = None,
        device: str = "cpu",
    ) -> None:
        """Load the model of a Hugging Face folder.

        Args:
            folder: configuration, tokenizer and safetensors.
            dtype: ``auto``, ``float32`` or ``bfloat16``.
            num_blocks: size of the KV pool.
            window_blocks: size of the one for the layers with a sliding window (``ModelInfo.windowed``); 0: the same.
            block_size: tokens per block.
            threads: for arithmetic; 0 leaves it to torch. Like the allocator's it is a setting of the whole process.
            kv_dtype: of the pool: ``auto`` (the model's), ``float32``, ``bfloat16`` or ``int8``.
            backend: how attention is computed; by default the fastest that passes the proof.
            kernels: asked for the C++ kernels once the weights are loaded; without them PyTorch computes everything.
            device: ``cpu``, ``cuda`` or ``cuda:N`` (under ROCm too); the C++ kernels are for the first only.

        Raises:
            WorkerError: the device cannot be used.
            ModelError: the folder cannot be loaded.
            UnsupportedModelError: the model cannot be served exactly.
        """
        if threads:
            torch.set_num_threads(threads)
        self.device = device
        default = attention_backend(device)
        self.info = read_model_info(folder)
        self._sampler = Sampler(self.info.eos_token_ids)
        torch_dtype = resolve_dtype(dtype, device)
        self.dtype = str(torch_dtype).removeprefix("torch.")
        self.fingerprint = weights_fingerprint(folder)
        model = load_model(self.info, torch_dtype, device)
        keep_freed_memory()
        pool_dtype = resolve_kv_dtype(kv_dtype, torch_dtype, device)
        self.kv_dtype = str(pool_dtype).removeprefix("torch.")
        self._pool = KvPool(
            self.info.layers,
            num_blocks,
            block_size,
            pool_dtype,
            device,
            windowed=self.info.windowed,
            window_blocks=(window_blocks or num_blocks) if self.info.windowed else 0,
        )
        backends = [backend or default]
        if device == "cpu" and backend is None and kernels and (built := kernels()):
            backends.insert(0, CppCpuAttention(built))
        way = self._prove(model, backends)
        self.method, self._compute, self._backend = way.method, way.forward, way.backend
        self.packed_bytes = way.packed_bytes

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[ChunkResult]:
        """See ``engine.batch.Runner``."""
        copies = batch.copies
        if copies:
            self._pool.copy(
                [(copy.source, copy.target) for copy in copies],
                [copy.window for copy in copies if copy.window is not None],
            )
        logits = _forward(batch.chunks, self._compute, self._backend, self._pool)
        return self._sampler.results(logits, batch.chunks)

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

    @torch.inference_mode()
    def _prove(self, model: PreTrainedModel, backends: Sequence[AttentionBackend]) -> _Way:
        """Compute a short text with the model's own attention and with ours; the first way that agrees is taken."""
        token_ids = self._any_tokens(min(_PROOF_TOKENS, self.info.max_positions))
        try:
            ids = torch.tensor([token_ids], device=self.device)
            expected = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
            model.set_attn_implementation(ATTENTION_NAME)
            for way in self._ways(model, backends):
                reason = self._disagreement(token_ids, expected.float(), way)
                if reason is None:
                    return way
                _log.warning("%s: %s is not used: %s", self.info.architecture, way.method, reason)
        except TypeError as error:
            raise UnsupportedModelError(f"{self.info.architecture} cannot be called as needed: {error}") from error
        raise UnsupportedModelError(f"{self.info.architecture} cannot be served exactly: {reason}.")

    def _ways(self, model: PreTrainedModel, backends: Sequence[AttentionBackend]) -> Iterator[_Way]:
        """The ways to compute this model, the fastest first."""
        weights = lean_weights(model, self.info.windows) if self.device == "cpu" else None
        for attention in backends:
            if weights is not None and isinstance(attention, CppCpuAttention) and self.dtype == "float32":
                compiled = KernelModel(weights, attention.kernels)
                yield _Way("lean forward (kernels)", compiled.forward, attention, compiled.weight_bytes)
                compiled.unpack()  # it was not taken, the next ways need the weights as they were
            if weights is not None:
                yield _Way("lean forward (torch)", LeanModel(weights).forward, attention)
            yield _Way("transformers' modules", _modules(model), attention)

    def _disagreement(self, token_ids: list[int], expected: torch.Tensor, way: _Way) -> str | None:
        """What is wrong with this way to compute, in a pool of its own; None when nothing is."""
        count, size = len(token_ids), self._pool.block_size
        table = list(range(-(-count // size)))
        pool = KvPool(
            self.info.layers,
            len(table),
            size,
            resolve_dtype(self.dtype),
            self.device,
            windowed=self.info.windowed,
            window_blocks=len(table) if self.info.windowed else 0,
        )
        recorder = _RecordingBackend(way.backend, self.info.layers)
        for start, end in pairwise(sorted({0, count // 2, count - 1, count})):
            chunk = _chunk(token_ids[start:end], start, table, table, sample=end == count)
            logits = _forward([chunk], way.forward, recorder if way.watchable else way.backend, pool)
        error = float((logits[0].float() - expected).norm() / (expected - expected.mean()).norm())
        if way.watchable:
            silent = [layer for layer in range(len(self.info.layers)) if layer not in recorder.windows]
            if silent:
                return f"its layers {silent} never stored K and V"
            if recorder.windows != dict(enumerate(self.info.windows)):
                return "its layers attend in other windows than its configuration says"
        if not error < _PROOF_ERROR[self.dtype]:  # NaN is no agreement
            return f"its output with paged attention differs by {error:.2g} from its own"
        return None

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
        most = self._pool.window_blocks
        windows = [[block % most for block in table] if most else [] for table in tables]  # what they hold is no matter
        return [
            _chunk(tokens, context, table, window, sample=True) for table, window in zip(tables, windows, strict=True)
        ]


class _Way:
    """A way to compute a model. ``packed_bytes`` are those of packed weights, None where they are as they were loaded.

    A ``watchable`` one calls its attention layer by layer, and can be asked about each.
    """

    def __init__(self, code: str, forward: Forward, backend: AttentionBackend, packed_bytes: int | None = None) -> None:
        self.method = f"{code}, attention {backend.name}"
        self.forward = forward
        self.backend = backend
        self.packed_bytes = packed_bytes
        self.watchable = packed_bytes is None


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


def _modules(model: PreTrainedModel) -> Forward:
    """The forward of transformers' modules over our attention."""

    def forward(
        token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        output = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            paged=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    return forward


def _forward(chunks: Sequence[Chunk], compute: Forward, backend: AttentionBackend, pool: KvPool) -> torch.Tensor:
    """Compute the chunks as one flat batch; logits ``[rows, vocabulary]`` in the order of ``Sampler.results``."""
    token_ids: list[int] = []
    positions: list[int] = []
    slices: list[SequenceSlice] = []
    windowed: list[SequenceSlice] = []
    rows: list[int] = []
    for chunk in chunks:
        if length := len(chunk.tokens):
            offset = len(token_ids) - chunk.start
            rows += range(chunk.scored.start + offset, chunk.scored.stop + offset)
            slices.append(SequenceSlice(len(token_ids), length, chunk.start, chunk.block_table))
            if pool.windowed:
                windowed.append(SequenceSlice(len(token_ids), length, chunk.start, chunk.window_table))
            token_ids += chunk.tokens
            positions += range(chunk.start, chunk.start + length)
        if chunk.sample:
            rows.append(len(token_ids) - 1)
    device = pool.keys[0].device
    return compute(
        torch.tensor(token_ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(rows, dtype=torch.long, device=device),
        begin_step(backend, pool, slices, windowed),
    )


def _chunk(tokens: list[int], start: int, block_table: list[int], window_table: list[int], *, sample: bool) -> Chunk:
    greedy = Sampling(max_tokens=1, temperature=0.0)
    return Chunk(0, tokens, start, block_table, sample, greedy, seed=0, output_index=0, window_table=window_table)
