"""Products with packed weights: right for every shape, and for each row the same bits whatever else is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.models.packing import PackedMatrix, PanelMemory
from engine.native.library import Kernels

ROWS = (1, 2, 7, 8, 9, 16, 31, 70, 300)
SHAPES = ((5, 3), (48, 200), (100, 37), (333, 400))
BLOCK = 32  # weights of a row with one scale, in GGUF's formats


@pytest.fixture(autouse=True, scope="module")
def two_threads(kernels: Kernels) -> Iterator[None]:
    kernels.use_threads(2)
    yield
    kernels.use_threads(torch.get_num_threads())


def product(kernels: Kernels, x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    out = torch.full((len(x), weight.pointers.n), float("nan"))
    kernels.multiply(x, weight.pointers, out)
    return out


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_with_a_packed_weight_is_that_of_torch(
    kernels: Kernels, outputs: int, inputs: int, biased: bool
) -> None:
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    packed = PackedMatrix(weight.clone(), bias, kernels)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(product(kernels, x, packed), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_is_the_same_bits_with_any_other_rows_and_on_any_number_of_threads(
    kernels: Kernels, outputs: int, inputs: int
) -> None:
    torch.manual_seed(inputs)
    packed = PackedMatrix(torch.randn(outputs, inputs), None, kernels)
    x = torch.randn(max(ROWS), inputs)
    alone = torch.cat([product(kernels, x[i : i + 1], packed) for i in range(len(x))])
    for threads in (1, 2, 3):
        kernels.use_threads(threads)
        for rows in ROWS:
            assert torch.equal(product(kernels, x[:rows], packed), alone[:rows])
            assert torch.equal(product(kernels, x[-rows:], packed), alone[-rows:])


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_packing_moves_nothing_out_of_the_weight_and_can_be_undone(kernels: Kernels, outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs)
    before, address = weight.clone(), weight.data_ptr()
    packed = PackedMatrix(weight, None, kernels)
    assert torch.equal(weight.flatten().sort().values, before.flatten().sort().values)
    assert packed.pointers.panels == address
    packed.unpack()
    assert torch.equal(weight, before)


def scaled(outputs: int, inputs: int, least: int, most: int, *, offset: bool) -> torch.Tensor:
    """A weight as GGUF dequantizes it: in every block of a row, integers times a scale, plus an offset."""
    blocks = outputs, inputs // BLOCK
    numbers = torch.randint(least, most + 1, (*blocks, BLOCK)).float()
    numbers[..., 3], numbers[..., 5] = least, most
    scale, offsets = (torch.rand(*blocks, 1).half().float() for _ in range(2))
    return (numbers * scale - (offsets if offset else 0)).view(outputs, inputs)


FORMS: dict[str, tuple[int, float, Callable[[], torch.Tensor]]] = {  # kind, bytes of a weight, and such a weight
    "bfloat16": (1, 2, lambda: torch.randn(336, 400).bfloat16().float()),
    "bfloat16-odd": (1, 2, lambda: torch.randn(333, 37).bfloat16().float()),
    "q4_1": (2, 0.75, lambda: scaled(333, 416, 0, 15, offset=True)),
    "q8_0": (3, 1.25, lambda: scaled(140, 64, -127, 127, offset=False)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_kept_in_fewer_bits_gives_the_same_bits_as_in_float32(kernels: Kernels, form: str) -> None:
    torch.manual_seed(7)
    kind, size, make = FORMS[form]
    weight = make()
    before = weight.clone()
    short = PackedMatrix(weight, torch.ones(len(weight)), kernels, PanelMemory(weight.numel()))
    long = PackedMatrix(weight.clone(), torch.ones(len(weight)), kernels)
    assert (short.pointers.kind, long.pointers.kind) == (kind, 0)
    assert size <= short.bytes_read / weight.numel() <= size * 1.2  # rounded up to whole panels
    assert torch.equal(weight, before)
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1])
        assert torch.equal(product(kernels, x, short), product(kernels, x, long))


@pytest.mark.parametrize("form", FORMS)
def test_a_single_bit_that_fewer_bits_do_not_hold_keeps_the_weight_in_float32(kernels: Kernels, form: str) -> None:
    torch.manual_seed(8)
    weight = FORMS[form][2]()
    last = weight.view(torch.int32)[-1, -1:]
    last.bitwise_xor_(1)
    packed = PackedMatrix(weight, None, kernels, PanelMemory(weight.numel()))
    assert packed.pointers.kind == 0
    assert packed.bytes_read == 4 * weight.numel()


def test_weights_of_zeros_and_of_what_is_no_number_keep_their_bits(kernels: Kernels) -> None:
    zeros = torch.zeros(48, 64)
    packed = PackedMatrix(zeros, None, kernels, PanelMemory(zeros.numel()))
    assert packed.pointers.kind == 2
    assert torch.equal(product(kernels, torch.randn(3, 64), packed), torch.zeros(3, 48))
    for odd in (-0.0, float("inf"), float("nan")):
        weight = scaled(48, 64, 0, 15, offset=True)
        weight[17, 40] = odd
        packed = PackedMatrix(weight.clone(), None, kernels, PanelMemory(weight.numel()))
        assert packed.pointers.kind == 0


def test_panels_find_room_where_their_memory_is_too_small(kernels: Kernels) -> None:
    weight = torch.randn(5, 3).bfloat16().float()
    packed = PackedMatrix(weight, None, kernels, PanelMemory(weight.numel()))
    x = torch.randn(2, 3)
    torch.testing.assert_close(product(kernels, x, packed), x @ weight.T)
