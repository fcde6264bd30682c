"""The block sizes of the FlashAttention paper's Algorithm 1."""

from dataclasses import dataclass
from typing import Any

import pytest

from blocktune.kernels.base.paper_rule import first_paper_config, paper_config
from blocktune.kernels.hardware.limits import ComputeLimits, limits_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

pytestmark = pytest.mark.triton_free


@dataclass
class Kernel:
    """The part of AttentionKernel that the rule asks; shared memory holds the queries and one key and value tile."""

    block_m: tuple[int, ...] = (16, 32, 64, 128, 256)
    block_n: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    fits: bool = True

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        blocks = {"block_m": self.block_m, "block_n": self.block_n}
        return blocks | {"num_warps": (4, 8), "num_stages": (1, 2, 3), "order": (0, 1)}

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        return KernelConfig("plain", 128, 64, 8, 3, extra=(("order", 1),))

    def omissions(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        needed = (config.block_m + 2 * config.block_n) * shape.head_dim * shape.element_bytes
        return () if self.fits and needed <= limits.shared_per_block_optin_bytes else ("does not fit",)


def shape(head_dim: int, dtype: str = "bfloat16") -> AttentionShape:
    return AttentionShape(
        batch=1,
        num_heads=1,
        num_heads_kv=1,
        seqlen_q=512,
        seqlen_k=512,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
    )


def paper(kernel: Any, head_dim: int, cc: tuple[int, int], dtype: str = "bfloat16") -> KernelConfig | None:
    return paper_config(kernel, shape(head_dim, dtype), limits_for(cc))


@pytest.mark.parametrize(
    ("head_dim", "cc", "dtype", "block_m", "block_n"),
    [
        (64, (9, 0), "bfloat16", 64, 256),  # ceil(116224 / 256) = 454
        (128, (9, 0), "bfloat16", 128, 128),  # ceil(116224 / 512) = 227
        (256, (9, 0), "bfloat16", 64, 64),  # ceil(116224 / 1024) = 114 for both
        (80, (9, 0), "bfloat16", 64, 256),  # 364, and 80 is no power of two
        (64, (8, 0), "bfloat16", 64, 256),  # ceil(83456 / 256) = 326
        (64, (8, 6), "bfloat16", 64, 128),  # ceil(50688 / 256) = 198
        (128, (8, 6), "float32", 32, 32),  # ceil(25344 / 512) = 50
    ],
)
def test_paper_config_is_the_rule_rounded_down(
    head_dim: int, cc: tuple[int, int], dtype: str, block_m: int, block_n: int
) -> None:
    config = paper(Kernel(), head_dim, cc, dtype)
    assert config == KernelConfig("plain", block_m, block_n, 4, 1, extra=(("order", 1),))


def test_paper_config_halves_the_keys_until_they_fit() -> None:
    # The rule says 512 keys of 16 elements each (ceil(116224 / 64) = 1816), which a stricter kernel cannot hold.
    class Strict(Kernel):
        def omissions(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
            return () if config.block_n <= 64 else ("too many keys",)

    config = paper(Strict(), 16, (9, 0))
    assert config is not None
    assert (config.block_m, config.block_n) == (16, 64)


def test_paper_config_takes_what_the_kernel_offers() -> None:
    config = paper(Kernel(block_n=(32, 64)), 64, (9, 0))
    assert config is not None
    assert config.block_n == 64


def test_a_kernel_of_larger_blocks_cannot_express_the_rule() -> None:
    wide = Kernel(block_m=(128, 192))
    assert paper(wide, 64, (9, 0)) is None, "at most head_dim rows of queries"
    assert paper(wide, 128, (9, 0)) is not None
    assert paper(Kernel(block_n=(512,)), 64, (9, 0)) is None


def test_the_rule_is_that_of_the_first_kernel_that_can_express_it() -> None:
    kernels: list[Any] = [Kernel(block_m=(128, 192)), Kernel(block_m=(32, 64)), Kernel()]
    found = [first_paper_config(kernels, shape(head_dim), limits_for((9, 0))) for head_dim in (128, 64, 16)]
    assert [config and config.block_m for config in found] == [128, 64, 16]
    assert first_paper_config(kernels[:1], shape(64), limits_for((9, 0))) is None


def test_paper_config_is_none_where_nothing_fits() -> None:
    assert paper(Kernel(fits=False), 64, (9, 0)) is None
