"""Blocks of K and V are swizzled alike, since ptxas 12.8 mistakes the address of V where they are not.

Seen on an H100 with queries wider than values of up to 32 columns: rows of three of four warps were wrong, not finite,
or read from an illegal address. test_narrow_values_gpu.py has these calls.
"""

import pytest

from blocktune.kernels.base.flash_kernel import SWIZZLE_BYTES, FlashKernel, operand_widths
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.portable.forward.tma import FlashForwardTma
from blocktune.kernels.values.shape import ELEMENT_BYTES, AttentionShape


def shape(head_dim: int, head_dim_v: int, dtype: str = "float16") -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 512, "seqlen_k": 512}
    return AttentionShape(**sizes, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "widths"),
    [
        (64, 64, (64, 64)),
        (64, 32, (64, 64)),
        (40, 24, (64, 64)),
        (32, 16, (32, 32)),
        (16, 32, (32, 32)),
        (160, 16, (256, 64)),
        (128, 64, (128, 64)),
        (192, 128, (256, 128)),
        (8, 8, (16, 16)),
    ],
)
def test_the_narrower_operand_is_padded_to_the_swizzle_of_the_wider_one(
    head_dim: int, head_dim_v: int, widths: tuple[int, int]
) -> None:
    assert operand_widths(shape(head_dim, head_dim_v)) == widths


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_of_both_operands_are_swizzled_alike_at_every_width(dtype: str) -> None:
    element_bytes = ELEMENT_BYTES[dtype]
    for head_dim in range(1, 257):
        for head_dim_v in range(1, 257):
            width, width_v = operand_widths(shape(head_dim, head_dim_v, dtype))
            assert width >= head_dim
            assert width_v >= head_dim_v
            assert min(width * element_bytes, SWIZZLE_BYTES) == min(width_v * element_bytes, SWIZZLE_BYTES)


@pytest.mark.parametrize("kernel", [FlashForward(), FlashForwardTma()])
def test_the_forward_kernels_take_these_widths(kernel: FlashKernel) -> None:
    narrow = shape(64, 32)
    constants = kernel.constants(kernel.default_config(narrow, limits_for((9, 0))), narrow)
    assert (constants["WIDTH"], constants["WIDTH_V"]) == (64, 64)
    assert (constants["HEAD_DIM"], constants["HEAD_DIM_V"]) == (64, 32)
