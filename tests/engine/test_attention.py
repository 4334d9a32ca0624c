"""One contract for every attention back end: paged attention equals attention over the sequence in one piece."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property

import pytest
import torch

from engine.attention.backend import (
    AttentionBackend,
    KvPool,
    LayerOptions,
    LayerShape,
    SequenceSlice,
    paged_attention,
    slot_mapping,
)
from engine.attention.cpp_cpu import CppCpuAttention
from engine.attention.reference import ReferenceAttention
from engine.attention.torch_cpu import TorchCpuAttention
from engine.errors import UnsupportedModelError

BLOCK = 4
every_backend = pytest.mark.parametrize("backend", ["reference", "torch_cpu", "cpp_cpu"], indirect=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread would only wait for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "cpp_cpu":
        return CppCpuAttention(request.getfixturevalue("kernels"))
    return ReferenceAttention() if request.param == "reference" else TorchCpuAttention()


def whole_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions) -> torch.Tensor:
    """The formula, position by position and head by head, in float64: ``[tokens, heads, value_dim]``."""
    heads, tokens, _ = query.shape
    group = heads // key.shape[0]
    output = torch.empty(tokens, heads, value.shape[-1])
    for position in range(tokens):
        first = 0 if options.sliding_window is None else max(0, position + 1 - options.sliding_window)
        for head in range(heads):
            keys = key[head // group, first : position + 1].double()
            scores = keys @ query[head, position].double() * options.scaling
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            if options.sinks is not None:
                scores = torch.cat((scores, options.sinks[head : head + 1].double()))
            weights = scores.softmax(0)[: len(keys)]
            output[position, head] = weights @ value[head // group, first : position + 1].double()
    return output


class Sequences:
    """Some sequences with random K, V and queries in a pool with shuffled blocks, computed slice by slice."""

    def __init__(self, lengths: Sequence[int], shape: LayerShape, heads: int, options: LayerOptions, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.options = options
        self.lengths = lengths
        needed = [-(-length // BLOCK) for length in lengths]
        blocks = list(range(sum(needed) + 3))
        self.random.shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(count)] for count in needed]
        # The value is large: one token read from a wrong place would show.
        self.queries = [torch.randn(heads, length, shape.key_dim) for length in lengths]
        self.keys = [torch.randn(shape.kv_heads, length, shape.key_dim) for length in lengths]
        self.values = [10 * torch.randn(shape.kv_heads, length, shape.value_dim) for length in lengths]
        self.pool = KvPool([shape], sum(needed) + 3, BLOCK, torch.float32)
        self.done = [0] * len(lengths)

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        tensors = zip(self.queries, self.keys, self.values, strict=True)
        return [whole_attention(*of_sequence, self.options) for of_sequence in tensors]

    def step(self, backend: AttentionBackend, counts: Sequence[int]) -> None:
        """Compute the next ``counts[i]`` tokens of each sequence in one flat batch and check them."""
        order = [i for i, count in enumerate(counts) if count]
        self.random.shuffle(order)
        slices, first = [], 0
        for i in order:
            slices.append(SequenceSlice(first, counts[i], self.done[i], self.tables[i]))
            first += counts[i]
        parts = [(i, slice(self.done[i], self.done[i] + counts[i])) for i in order]
        query = torch.cat([self.queries[i][:, part] for i, part in parts], dim=1)
        key = torch.cat([self.keys[i][:, part] for i, part in parts], dim=1)
        value = torch.cat([self.values[i][:, part] for i, part in parts], dim=1)
        output = backend.begin(self.pool, slices).attend(0, query, key, value, self.options)
        for i, piece in zip(order, slices, strict=True):
            got = output[piece.first : piece.first + piece.length]
            want = self.expected[i][piece.start : piece.start + piece.length]
            torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
            self.done[i] += piece.length

    def run(self, backend: AttentionBackend, most: int) -> None:
        while any(done < length for done, length in zip(self.done, self.lengths, strict=True)):
            left = [length - done for done, length in zip(self.done, self.lengths, strict=True)]
            counts = [self.random.choice([0, 1, min(n, most), min(n, 2)]) if n else 0 for n in left]
            if any(counts):
                self.step(backend, counts)


@every_backend
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        LayerOptions(0.3),
        LayerOptions(0.3, sliding_window=5),
        LayerOptions(0.3, sliding_window=1),
        LayerOptions(0.3, softcap=1.5),
        LayerOptions(0.3, sliding_window=6, softcap=1.5),
        LayerOptions(0.3, sinks=torch.linspace(-3, 3, 9)),
        LayerOptions(0.3, sliding_window=6, sinks=torch.linspace(-3, 3, 9)),
    ],
    ids=["plain", "window", "window-1", "softcap", "softcap-window", "sinks", "sinks-window"],
)
def test_mixed_batches_equal_attention_in_one_piece(
    backend: AttentionBackend, options: LayerOptions, heads: tuple[int, int], seed: int
) -> None:
    if options.sinks is not None:
        options = LayerOptions(options.scaling, options.sliding_window, sinks=options.sinks[: heads[0]])
    shape = LayerShape(heads[1], key_dim=8, value_dim=8 if seed else 6)
    Sequences([1, 3, 13, 22, 9], shape, heads[0], options, seed).run(backend, most=9)


@every_backend
def test_decodes_of_very_different_context_are_exact(backend: AttentionBackend) -> None:
    lengths = [2, 30, 300, 301, 700]
    sequences = Sequences(lengths, LayerShape(1, 4, 4), 2, LayerOptions(0.5), seed=1)
    for i, length in enumerate(lengths):  # K and V as if computed earlier
        slots = slot_mapping([SequenceSlice(0, length - 1, 0, sequences.tables[i])], BLOCK)
        rows = sequences.pool.rows(slots, 1)
        sequences.pool.write(0, rows, sequences.keys[i][:, :-1], sequences.values[i][:, :-1])
    slices = [SequenceSlice(i, 1, length - 1, sequences.tables[i]) for i, length in enumerate(lengths)]
    query, key, value = (
        torch.cat([tensor[:, -1:] for tensor in tensors], dim=1)
        for tensors in (sequences.queries, sequences.keys, sequences.values)
    )
    output = backend.begin(sequences.pool, slices).attend(0, query, key, value, LayerOptions(0.5))
    for i in range(len(lengths)):
        scores = (sequences.keys[i][0] @ sequences.queries[i][:, -1].T * 0.5).softmax(0)
        torch.testing.assert_close(output[i], scores.T @ sequences.values[i][0], atol=2e-4, rtol=2e-4)


@every_backend
@pytest.mark.parametrize("window", [None, 600], ids=["full", "window"])
def test_a_long_chunk_after_a_long_prefix_is_exact(backend: AttentionBackend, window: int | None) -> None:
    """Longer than the blocks of keys that fused kernels work in: whole blocks of them are hidden from some rows."""
    options = LayerOptions(0.5, sliding_window=window)
    shape = LayerShape(1, 4, 4)
    length, start = 1400, 611
    sequences = Sequences([length], shape, 2, options, seed=2)
    rows = sequences.pool.rows(slot_mapping([SequenceSlice(0, start, 0, sequences.tables[0])], BLOCK), 1)
    query, key, value = sequences.queries[0], sequences.keys[0], sequences.values[0]
    sequences.pool.write(0, rows, key[:, :start], value[:, :start])
    piece = SequenceSlice(0, length - start, start, sequences.tables[0])
    output = backend.begin(sequences.pool, [piece]).attend(
        0, query[:, start:], key[:, start:], value[:, start:], options
    )
    position = torch.arange(start, length)[:, None]
    hidden = torch.arange(length)[None] > position
    if window is not None:
        hidden |= torch.arange(length)[None] <= position - window
    scores = (query[:, start:] @ key[0].T * 0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    torch.testing.assert_close(output, (scores @ value[0]).transpose(0, 1), atol=2e-4, rtol=2e-4)


@every_backend
def test_only_the_slots_of_the_batch_are_written(backend: AttentionBackend) -> None:
    sequences = Sequences([6, 7], LayerShape(2, 4, 4), 2, LayerOptions(0.5), seed=3)
    for tensor in (*sequences.pool.keys, *sequences.pool.values):
        tensor.fill_(7.0)
    sequences.step(backend, [5, 0])
    table = sequences.tables[0]
    for pool, new in ((sequences.pool.keys[0], sequences.keys[0]), (sequences.pool.values[0], sequences.values[0])):
        assert torch.equal(pool[table[0]], new[:, :4])
        assert torch.equal(pool[table[1], :, :1], new[:, 4:5])
        assert (pool[table[1], :, 1:] == 7.0).all()
        untouched = [block for block in range(sequences.pool.num_blocks) if block not in table]
        assert (pool[untouched] == 7.0).all()


class _Module(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    "extra",
    [{"position_bias": torch.zeros(1)}, {"block_indices": torch.zeros(1)}, {"is_causal": False}],
    ids=lambda extra: next(iter(extra)),
)
def test_what_would_be_left_out_is_refused(extra: dict[str, object]) -> None:
    step = ReferenceAttention().begin(KvPool([LayerShape(1, 2, 2)], 1, 4, torch.float32), [])
    tensor = torch.zeros(1, 1, 1, 2)
    with pytest.raises(UnsupportedModelError, match=next(iter(extra))):
        paged_attention(_Module(), tensor, tensor, tensor, None, paged=step, **extra)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        paged_attention(_Module(), tensor, tensor, tensor, torch.zeros(1), paged=step)
