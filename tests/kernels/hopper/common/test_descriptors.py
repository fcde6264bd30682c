"""Descriptors of the copy engine: which strided tensors they describe, and which ones a Hopper kernel leaves to
others."""

from typing import Any

import pytest
import torch

from blocktune.kernels.hopper.common.descriptors import PACKED_ROWS, describe, describe_packed
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper

KERNEL = FlashForwardHopper()


def dense(layout: str = "bhsd", heads: int = 4, length: int = 256, dim: int = 64, **kind: Any) -> torch.Tensor:
    if layout == "bhsd":
        return torch.empty(2, heads, length, dim, **{"dtype": torch.float16} | kind)
    return torch.empty(2, length, heads, dim, **{"dtype": torch.float16} | kind).transpose(1, 2)


def test_descriptors_of_strided_tensors() -> None:
    found = describe(dense("bshd"), 128, 32)
    assert (found.shape, found.strides) == ([2, 4, 256, 64], [256 * 256, 64, 256, 1])
    assert found.block_shape == [1, 1, 128, 32]
    assert found.layout.swizzle_byte_width == 64
    assert describe(dense(), 64).block_shape == [1, 1, 64, 64]
    single = describe(dense(heads=1)[:1], 64)
    assert single.strides == [64, 64, 64, 1]  # no step is made along dimensions of one


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_packed_descriptor_ends_where_its_sequence_ends(layout: str) -> None:
    """Row i of a sequence of n rows that ends at token e: the address of token e - n + i, modulo 2^64 bytes."""
    tensor = dense(layout, length=1000)[:1]
    found = describe_packed(tensor, 64, 64)
    assert found.shape[-3:] == [4, PACKED_ROWS, 64]
    for end, rows, row in ((1000, 300, 0), (700, 700, 699), (20, 5, 3)):
        place = [PACKED_ROWS, end, 2, PACKED_ROWS - rows + row, 8]
        address = 2 * sum(coordinate * stride for coordinate, stride in zip(place, found.strides, strict=True))
        expected = 2 * (2 * tensor.stride(1) + (end - rows + row) * tensor.stride(2) + 8)
        assert address % 2**64 == expected
        assert place[3] + rows - row == found.shape[3]  # the first row behind the end is outside


def strided() -> dict[str, torch.Tensor]:
    packed = torch.empty(2, 256, 3 * 4 * 64, dtype=torch.float16)  # q, k and v of a fused projection
    return {
        "slice of a packed tensor": packed[..., :256].view(2, 256, 4, 64).transpose(1, 2),
        "padded rows": torch.empty(2, 4, 256, 72, dtype=torch.float16)[..., :64],
        "part of the length": dense(length=512)[:, :, :256],
        "one head": dense(heads=1),
    }


@pytest.mark.parametrize("kind", strided())
def test_strided_tensors_are_taken(kind: str) -> None:
    assert KERNEL.layout_problem(strided()[kind], dense("bshd"), dense()) is None


def refused() -> dict[str, torch.Tensor]:
    memory = torch.empty(dense().numel() + 8, dtype=torch.float16)
    return {
        "repeated heads": dense(heads=1).expand(2, 4, 256, 64),
        "head_dim before length": torch.empty(2, 4, 64, 256, dtype=torch.float16).transpose(2, 3),
        "odd rows": torch.empty(2, 4, 256, 65, dtype=torch.float16)[..., :64],
        "misaligned": memory[1:-7].view(dense().shape),
    }


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("kind", refused())
def test_other_tensors_are_left_to_others(kind: str, which: int) -> None:
    tensors = [dense(), dense("bshd"), dense()]
    assert KERNEL.layout_problem(*tensors) is None
    tensors[which] = refused()[kind]
    name = ("query", "key", "value")[which]
    assert KERNEL.layout_problem(*tensors) == (
        f"rows of {name} must be contiguous, and 16 must divide its address and its strides in bytes, for {KERNEL.name}"
    )
