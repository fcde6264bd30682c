"""The kernels of the ladder against the float64 reference: in Triton's interpreter, compiled where a GPU is."""

import math
from itertools import product

import pytest
import torch

from blocktune.kernels.base.flash_kernel import LOG2_E
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.triton_modes import DEVICE, ON_GPU, runs

HISTORICAL = ["flash_v1", "flash_v2", "flash_fwd_padded", "flash_fwd_transposed"]
pytestmark = [
    pytest.mark.interpreted,
    runs,
    # Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
# As in tests/kernels/portable/forward/test_flash_fwd.py; the paper's algorithm rounds each tile's probabilities against
# the tile's own maximum.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-6}
SIZES = (65, 96) if not ON_GPU else (1000, 1024)


def shape_of(**changes: object) -> AttentionShape:
    base = {"batch": 1, "num_heads": 2, "num_heads_kv": 2, "seqlen_q": 64, "seqlen_k": 64, "head_dim": 16}
    base |= {"dtype": "float16"} | changes
    return AttentionShape(**({"head_dim_v": base["head_dim"]} | base))


def config_of(kernel: str, **changes: int) -> KernelConfig:
    """The kernel's default for a Hopper GPU, in small blocks; with changes, if any."""
    own = get_kernel(kernel).default_config(shape_of(), limits_for((9, 0))).parameters
    small = {name: min(get_kernel(kernel).parameters[name]) for name in ("block_m", "block_n")}
    return KernelConfig.of(kernel, own | (small if not ON_GPU else {}) | changes)


def tensors(shape: AttentionShape, layout: str = "bhsd") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, rows: int, dim: int) -> torch.Tensor:
        sizes = (shape.batch, heads, rows, dim) if layout == "bhsd" else (shape.batch, rows, heads, dim)
        tensor = torch.randn(sizes, generator=generator).to(getattr(torch, shape.dtype)).to(DEVICE)
        return tensor if layout == "bhsd" else tensor.transpose(1, 2)

    q = draw(shape.num_heads, shape.seqlen_q, shape.head_dim)
    keys = shape.num_heads_kv, shape.seqlen_k
    return q, draw(*keys, shape.head_dim), draw(*keys, shape.head_dim_v)


def run(config: KernelConfig, shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float):
    out = torch.full((*q.shape[:3], shape.head_dim_v), float("nan"), dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:3], float("nan"), dtype=torch.float32, device=DEVICE)
    get_kernel(config.kernel).bind(config, shape)(q, k, v, out, lse, scale)
    return out, lse


def check(config: KernelConfig, shape: AttentionShape, layout: str = "bhsd", scale: float | None = None) -> None:
    assert get_kernel(config.kernel).violations(config, shape, limits_for((9, 0))) == ()
    scale = shape.head_dim**-0.5 if scale is None else scale
    q, k, v = tensors(shape, layout)
    out, lse = run(config, shape, q, k, v, scale)
    expected, expected_lse = attention_reference(q, k, v, causal=shape.causal, scale=scale, dtype=torch.float64)
    assert torch.isfinite(out).all()
    assert (out.double() - expected).norm() <= TOLERANCE[shape.dtype] * expected.norm()
    seen = ~expected_lse.isneginf()
    assert torch.equal(~lse.isneginf(), seen)
    assert torch.allclose(lse.double()[seen], expected_lse[seen], atol=1e-4, rtol=1e-4)


def test_the_ladder_has_its_kernels_and_none_competes_unasked() -> None:
    assert all(get_kernel(name).historical for name in HISTORICAL)
    assert not set(HISTORICAL) & {kernel.name for kernel in kernels_for(shape_of(), limits_for((9, 0)))}


@pytest.mark.few(12)
@pytest.mark.parametrize(("kernel", "causal"), list(product(HISTORICAL, Causal)))
@pytest.mark.parametrize("lengths", [(64, 64), SIZES, SIZES[::-1]], ids=str)
def test_masks_and_ragged_lengths(kernel: str, causal: Causal, lengths: tuple[int, int]) -> None:
    check(config_of(kernel), shape_of(seqlen_q=lengths[0], seqlen_k=lengths[1], causal=causal))


@pytest.mark.few(8)
@pytest.mark.parametrize("kernel", HISTORICAL)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 77), (70, 5), (100, 20)], ids=str)
def test_short_lengths_and_rows_that_see_no_key(kernel: str, lengths: tuple[int, int]) -> None:
    for causal in (Causal.UPPER_LEFT, Causal.LOWER_RIGHT):
        check(config_of(kernel), shape_of(seqlen_q=lengths[0], seqlen_k=lengths[1], num_heads=1, num_heads_kv=1,
                                          causal=causal))  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("kernel", HISTORICAL)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_grouped_heads_and_strides(kernel: str, heads: tuple[int, int], layout: str) -> None:
    shape = shape_of(
        batch=2, num_heads=heads[0], num_heads_kv=heads[1], seqlen_q=40, seqlen_k=50, causal=Causal.LOWER_RIGHT
    )
    check(config_of(kernel), shape, layout)


@pytest.mark.few(8)
@pytest.mark.parametrize("kernel", HISTORICAL)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 32), (24, 24), (32, 16), (80, 80)])
def test_head_dimensions(kernel: str, head_dim: int, head_dim_v: int) -> None:
    check(config_of(kernel), shape_of(head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=33, seqlen_k=49))


@pytest.mark.parametrize("kernel", HISTORICAL)
def test_float32_keeps_its_precision(kernel: str) -> None:
    shape = shape_of(dtype="float32", seqlen_q=50, seqlen_k=70, causal=Causal.UPPER_LEFT)
    check(config_of(kernel), shape)
    check(config_of(kernel), shape, "bshd")


@pytest.mark.parametrize("kernel", HISTORICAL)
def test_scale_and_very_negative_scores(kernel: str) -> None:
    check(config_of(kernel), shape_of(), scale=0.7)
    shape = shape_of(seqlen_k=100)
    q, k, v = tensors(shape)
    q, k = q.abs() * 8, -k.abs() * 8
    out, _ = run(config_of(kernel), shape, q, k, v, 0.25)
    expected, _ = attention_reference(q, k, v, scale=0.25, dtype=torch.float64)
    assert (out.double() - expected).norm() <= TOLERANCE[shape.dtype] * expected.norm()


@pytest.mark.parametrize("kernel", HISTORICAL)
def test_log_sum_exp_is_optional(kernel: str) -> None:
    shape = shape_of(causal=Causal.UPPER_LEFT)
    q, k, v = tensors(shape)
    out = torch.full_like(q, float("nan"))
    get_kernel(kernel).bind(config_of(kernel), shape)(q, k, v, out, None, 0.25)
    expected, _ = attention_reference(q, k, v, causal=shape.causal, scale=0.25, dtype=torch.float64)
    assert (out.double() - expected).norm() <= TOLERANCE[shape.dtype] * expected.norm()


@pytest.mark.parametrize("kernel", ["flash_fwd", *HISTORICAL])
def test_the_saved_log_sum_exp_times_log2_e_is_the_base_2_one(kernel: str) -> None:
    """The kernels compute m + log2(l) in base 2 and save it as a natural logarithm; the factor between both is exact to
    float32's rounding, so whoever recomputes probabilities with exp2 may multiply."""
    shape = shape_of(seqlen_q=40, seqlen_k=70, dtype="float32")
    q, k, v = tensors(shape)
    config = config_of(kernel, schedule=0) if kernel == "flash_fwd" else config_of(kernel)
    _, lse = run(config, shape, q, k, v, 0.25)
    in_base_2 = 0.25 * LOG2_E * (q.double() @ k.double().transpose(-1, -2))
    maximum = in_base_2.amax(-1)
    expected = maximum + torch.log2(torch.exp2(in_base_2 - maximum[..., None]).sum(-1))
    assert math.isclose(LOG2_E, math.log2(math.e), rel_tol=1e-15)
    torch.testing.assert_close(lse.double() * LOG2_E, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kernel", HISTORICAL)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
def test_real_sizes(kernel: str, dtype: str, head_dim: int, causal: Causal) -> None:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 2, "seqlen_q": 1000, "seqlen_k": 1000}
    shape = shape_of(**sizes, head_dim=head_dim, dtype=dtype, causal=causal)
    config = get_kernel(kernel).default_config(shape, limits_for((9, 0)))
    check(config, shape)
    check(config, shape)  # what a pass leaves in device memory must not depend on luck
