"""Which default small, masked and narrow shapes get on a Hopper GPU, as it was found to be best there."""

from dataclasses import replace

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hopper.forward.defaults import THREE_OVER_KEYS, TWO_WITH_QUERIES, default_values
from blocktune.kernels.registry import default_kernel
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal

pytestmark = pytest.mark.triton_free

LIMITS = device_named("h200").limits
PLAIN = AttentionShape(batch=2, num_heads=8, num_heads_kv=8, seqlen_q=128, seqlen_k=128, head_dim=64)


def sized(seqlen: int, head_dim: int = 64, *, mask: str = "", batch: int = 2, causal: bool = False) -> AttentionShape:
    return replace(
        PLAIN, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, head_dim_v=head_dim,
        features=Features.parse(mask), causal=Causal.UPPER_LEFT if causal else Causal.NONE,
    )  # fmt: skip


def kernel_of(shape: AttentionShape) -> str:
    kernel = default_kernel(shape, LIMITS)
    assert kernel is not None
    return kernel.name


@pytest.mark.parametrize("causal", [False, True])
def test_two_consumers_take_tiles_that_end_soon(causal: bool) -> None:
    soon = sized(47, 56, causal=causal), sized(300, batch=64, causal=causal), sized(2048, batch=1, causal=causal)
    for shape in soon:
        assert default_values(shape) == TWO_WITH_QUERIES
        assert kernel_of(shape) == "flash_fwd_hopper"
    for shape in (sized(2048, batch=16, causal=causal), sized(4096, batch=1, causal=causal)):
        assert default_values(shape) != TWO_WITH_QUERIES


def test_rows_that_end_inside_of_32_bytes_get_three_consumers() -> None:
    for head_dim in (72, 88, 104):
        assert default_values(sized(2048, head_dim)) == THREE_OVER_KEYS
        assert default_values(sized(2048, head_dim, causal=True)) == THREE_OVER_KEYS
    assert default_values(sized(2048, 80)) != THREE_OVER_KEYS


@pytest.mark.parametrize("mask", ["boolean", "additive"])
def test_small_calls_read_their_mask_themselves(mask: str) -> None:
    for shape in (sized(64, mask=mask), sized(256, 128, mask=mask), sized(149, mask=mask), sized(128, 208, mask=mask)):
        assert kernel_of(shape) == "flash_fwd_general"
    for shape in (sized(1024, mask=mask), sized(333, 24, mask=mask), sized(125, 104, mask=mask)):
        assert kernel_of(shape) == "flash_fwd_hopper"


@pytest.mark.parametrize("head_dim", [24, 32])
def test_narrow_heads_with_a_mask_are_padded(head_dim: int) -> None:
    """The portable kernel takes 1.3 to 7 times as long."""
    assert kernel_of(sized(1024, head_dim, mask="additive", batch=8)) == "flash_fwd_hopper"
    assert kernel_of(sized(2048, 32, batch=8)) == "flash_fwd_tma"


def test_additive_masks_get_tiles_that_do_not_spill() -> None:
    for head_dim, head_dim_v in ((72, 72), (96, 96), (40, 128), (128, 64)):
        shape = replace(sized(2048, mask="additive"), head_dim=head_dim, head_dim_v=head_dim_v)
        assert default_values(shape) == TWO_WITH_QUERIES


def test_few_queries_with_a_mask_get_tiles_of_few_rows() -> None:
    kernel = default_kernel(sized(22, mask="additive"), LIMITS)
    assert kernel is not None
    assert kernel.default_config(sized(22, mask="additive"), LIMITS).block_m == 32
    assert kernel.default_config(sized(64, mask="additive"), LIMITS).block_m == 64
