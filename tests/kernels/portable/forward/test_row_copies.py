"""Copies of rows with zeros, by one launch: in Triton's interpreter on the CPU, compiled where a GPU is."""

from itertools import product

import pytest
import torch
from torch.nn.functional import pad

from blocktune.kernels.hopper.backward.wide.join import ROWS, join_wide_parts_kernel
from blocktune.kernels.portable.forward.row_copies import pad_rows_launch
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.launches.padding import LaunchedCopies, PadRows, padding_of
from tests.support.triton_modes import DEVICE, runs

pytestmark = [
    pytest.mark.interpreted,
    runs,
    # Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
CALL = Call(causal=Causal.NONE, scale=1.0)


def rows(heads: int, length: int, dim: int, *, length_first: bool) -> torch.Tensor:
    sizes = (2, length, heads, dim) if length_first else (2, heads, length, dim)
    made = torch.randn(sizes, device=DEVICE).to(torch.float16)
    return made.transpose(1, 2) if length_first else made


@pytest.mark.parametrize("order", list(product((True, False), repeat=2)), ids=str)
@pytest.mark.parametrize(("dim", "dim_v"), [(67, 67), (64, 10), (121, 128), (1, 33)])
def test_copies_are_the_rows_and_zeros(dim: int, dim_v: int, order: tuple[bool, bool]) -> None:
    query, key = rows(4, 7, dim, length_first=order[0]), rows(2, 40, dim, length_first=order[1])
    value = rows(2, 40, dim_v, length_first=order[0])[:, :, :39]  # begins of rows are not those of a whole tensor
    key = key[:, :, 1:]
    padding = padding_of(query, value, CALL)
    assert padding is not None
    found = LaunchedCopies(padding, query, key, value)(query, key, value)
    for copy, wanted in zip(found, padding.copies(query, key, value), strict=True):
        assert torch.equal(copy, wanted)
        assert copy.stride() == wanted.stride()


def test_nothing_is_written_beyond_the_copies() -> None:
    query, value = rows(3, 5, 20, length_first=True), rows(3, 9, 20, length_first=True)
    wide = [torch.full((2 * 3 * length * 24 + 50,), 7.0, device=DEVICE).half() for length in (5, 9, 9)]
    pad_rows_launch(query, value, value, (24, 24), length_first=False)(query, value, value, *wide)
    for memory, own in zip(wide, (query, value, value), strict=True):
        assert torch.equal(memory[:-50].view(2, 3, -1, 24), pad(own, (0, 4)))
        assert (memory[-50:] == 7).all()


def test_gradients_are_those_of_the_columns_that_were_there() -> None:
    tensors = [rows(2, 5, dim, length_first=True).requires_grad_() for dim in (20, 20, 24)]
    padding = padding_of(tensors[0], tensors[2], CALL)
    assert padding is not None
    copies = PadRows.apply(LaunchedCopies(padding, *tensors), *tensors)
    grads = [torch.randn_like(copy) for copy in copies]
    found = torch.autograd.grad(copies, tensors, grads)
    for own, grad, tensor in zip(found, grads, tensors, strict=True):
        assert torch.equal(own, grad[..., : tensor.shape[3]])


@pytest.mark.parametrize("length_first", [True, False])
def test_parts_of_wide_gradients_are_added_up(length_first: bool) -> None:
    torch.manual_seed(0)
    parts, dims = 3, (136, 200)
    left = [torch.randn(2, 2, parts, 45, dim, device=DEVICE).half() for dim in dims]
    dk, dv = (rows(2, 45, dim, length_first=length_first).fill_(float("nan")) for dim in dims)
    join_wide_parts_kernel[(-(-45 // ROWS) * 2 * 2, 2)](
        *left, dk, dv, *dk.stride()[:3], *dv.stride()[:3], 2, 45,
        HEAD_DIM=dims[0], HEAD_DIM_V=dims[1], PARTS=parts, ROWS=ROWS, UNIT=1, num_warps=4,
    )  # fmt: skip
    for own, of_parts in zip((dk, dv), left, strict=True):
        torch.testing.assert_close(own, of_parts.float().sum(2).half(), rtol=2e-3, atol=1e-3)
