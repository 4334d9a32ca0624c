"""What this machine can do at most: matrix products of a model's shapes, and reading its weights from memory.

A step cannot be faster than its products, nor than its weights come from memory. So the limit of a decode step is the
larger of the two, and of a prefill its products alone (one reading serves hundreds of tokens there). Attention, norms,
sampling and everything else count as nothing: a share of 100 % cannot be reached.

The products are measured with operands that are in the processor's caches already, each by the fastest way known here
(PyTorch's and our own kernel's): what they cost when weights have to come from memory first is no limit
of the arithmetic, and is what the other figure is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from transformers import AutoConfig

from engine.models.packing import PackedMatrix
from engine.native.library import Kernels

__all__ = ["Limits", "ModelShape", "Product", "best_seconds", "measure_limits", "model_shape", "split"]

_BUFFER_BYTES: Final = 1 << 30  # to be read; far more than caches hold
_HEAD_ROWS: Final = 4096  # of the vocabulary, measured in place of all, which fit no cache
_TRIALS: Final = 5
_TRIAL_SECONDS: Final = 0.01


class Product(msgspec.Struct, frozen=True):
    """``count`` products of ``[rows, inputs]`` with a weight ``[outputs, inputs]``."""

    name: str
    inputs: int
    outputs: int
    count: int = 1

    @property
    def weights(self) -> int:
        """Elements of all its weights."""
        return self.inputs * self.outputs * self.count

    def flops(self, rows: int) -> int:
        """Floating-point operations for that many rows, a multiplication and an addition being two."""
        return 2 * rows * self.weights


class ModelShape(msgspec.Struct, frozen=True):
    """The matrix products of a model: of its layers, for every token, and of its head, for each sampled row."""

    layers: tuple[Product, ...]
    head: Product

    @property
    def weights(self) -> int:
        """Elements that a step reads at least: every layer and the whole head, once. The embedding's rows are few."""
        return sum(product.weights for product in self.layers) + self.head.weights


class Limits(msgspec.Struct, frozen=True):
    """``bandwidth`` in bytes per second; ``rates`` by rows and product in floating-point operations per second.

    ``bytes_read`` are those of all weights as the engine keeps them: fewer than ``itemsize`` each where that is exact.
    """

    shape: ModelShape
    itemsize: int
    bytes_read: int
    bandwidth: float
    rates: dict[int, dict[str, float]]

    def read_seconds(self) -> float:
        """To read all weights once, as the engine keeps them."""
        return self.bytes_read / self.bandwidth

    def whole_read_seconds(self) -> float:
        """To read all weights once in the dtype that is computed in."""
        return self.shape.weights * self.itemsize / self.bandwidth

    def product_seconds(self, rows: int, sampled: int) -> float:
        """For the products of one step over ``rows`` tokens, ``sampled`` of which go through the head.

        Both must be among the rows that were measured.
        """
        layers = sum(product.flops(rows) / self.rates[rows][product.name] for product in self.shape.layers)
        return layers + self.shape.head.flops(sampled) / self.rates[sampled][self.shape.head.name]

    def decode_seconds(self, batch: int) -> float:
        """The limit of a decode step of ``batch`` sequences."""
        return max(self.read_seconds(), self.product_seconds(batch, batch))

    def whole_decode_seconds(self, batch: int) -> float:
        """The limit where every weight has to be read in the dtype that is computed in."""
        return max(self.whole_read_seconds(), self.product_seconds(batch, batch))

    def prefill_seconds(self, chunks: Sequence[int]) -> float:
        """The limit of a prompt that is computed in chunks of these many tokens, its last one being sampled."""
        head = self.shape.head
        layers = sum(self.product_seconds(rows, 1) for rows in chunks)
        return layers - (len(chunks) - 1) * head.flops(1) / self.rates[1][head.name]


def split(tokens: int, largest: int) -> list[int]:
    """A prompt's chunks when each has as many tokens as it may."""
    return [largest] * (tokens // largest) + ([tokens % largest] if tokens % largest else [])


def model_shape(folder: Path) -> ModelShape:
    """Read the shapes of a Llama-like model from its Hugging Face folder.

    Raises:
        ValueError: it is of another kind, whose products are not known here.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(f"the limits of a {config.model_type} model are not known here, only of Llama's family")
    hidden, wide, count = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return ModelShape(
        layers=(
            Product("qkv", hidden, queries + 2 * keys, count),
            Product("output", queries, hidden, count),
            Product("gate_up", hidden, 2 * wide, count),
            Product("down", wide, hidden, count),
        ),
        head=Product("head", hidden, config.vocab_size),
    )


def measure_limits(
    shape: ModelShape, rows: Sequence[int], dtype: torch.dtype, kernels: Kernels | None, packed_bytes: int | None
) -> Limits:
    """Measure reading and all products for each number of ``rows``, on as many threads as torch has.

    ``packed_bytes`` are those of all weights, None where they are in ``dtype``.
    """
    products = (*shape.layers, shape.head)
    rates = {count: {product.name: _rate(product, count, dtype, kernels) for product in products} for count in rows}
    bytes_read = shape.weights * dtype.itemsize if packed_bytes is None else packed_bytes
    return Limits(shape, dtype.itemsize, bytes_read, _bandwidth(), rates)


def best_seconds(call: Callable[[], object]) -> float:
    """The time of one call at its best: of several trials, each of as many calls as make it long enough to time."""
    call()
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-7)
    calls = max(1, round(_TRIAL_SECONDS / once))
    best = once
    for _ in range(_TRIALS):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def _rate(product: Product, rows: int, dtype: torch.dtype, kernels: Kernels | None) -> float:
    """Operations per second of one product by the fastest way."""
    x = torch.randn(rows, product.inputs).to(dtype)
    weight = torch.randn(min(product.outputs, _HEAD_ROWS), product.inputs).to(dtype)
    out = torch.empty(rows, weight.shape[0], dtype=dtype)
    ways: list[Callable[[], object]] = [
        lambda: torch.mm(x, weight.T, out=out),
        lambda: torch.nn.functional.linear(x, weight),
    ]
    if kernels is not None and dtype == torch.float32:
        packed = PackedMatrix(weight.clone(), None, kernels)
        ways.append(lambda: kernels.multiply(x, packed.pointers, out))
    with torch.inference_mode():
        return 2 * rows * weight.numel() / min(map(best_seconds, ways))


def _bandwidth() -> float:
    """Bytes per second of reading memory once through with all threads, by the faster of two ways."""
    buffer = torch.ones(_BUFFER_BYTES // 4)
    matrix, vector = buffer.view(-1, 1024), torch.ones(1024)
    with torch.inference_mode():
        return _BUFFER_BYTES / min(best_seconds(lambda: torch.mv(matrix, vector)), best_seconds(buffer.sum))
