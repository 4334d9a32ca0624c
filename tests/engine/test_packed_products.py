"""Products with packed weights: right for every shape, and for each row the same bits whatever else is computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.models.packing import PackedMatrix
from engine.native.library import Kernels

ROWS = (1, 2, 7, 8, 9, 16, 31, 70, 300)
SHAPES = ((5, 3), (48, 200), (100, 37), (333, 400))


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
