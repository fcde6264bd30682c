"""Every portable kernel against the float64 reference: in Triton's interpreter on the CPU, compiled where a GPU is."""

from itertools import product

import pytest
import torch

from blocktune.kernels.base.flash_kernel import FlashKernel
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.triton_modes import DEVICE, ON_GPU, runs

PORTABLE = [name for name, kernel in KERNELS.items() if isinstance(kernel, FlashKernel)]
pytestmark = [
    pytest.mark.interpreted,
    runs,
    # Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # Exponents that overflow are part of schedule 2, which looks for them afterwards; NumPy warns about them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

# Relative Frobenius error against float64. A 16-bit probability carries half a unit in the last place (2^-9 for
# bfloat16, 2^-12 for float16) into the second product; float32 products are three tf32 products, good to about 1e-6.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-6}
LSE_TOLERANCE = {"bfloat16": 1e-4, "float16": 1e-4, "float32": 1e-5}


SHORT_DTYPES = ["float16", "bfloat16"] if ON_GPU else ["float16"]  # the interpreter multiplies bfloat16 as integers
DTYPES = [*SHORT_DTYPES, "float32"]


def shape_of(**changes: object) -> AttentionShape:
    base = {
        "batch": 1,
        "num_heads": 2,
        "num_heads_kv": 2,
        "seqlen_q": 160,
        "seqlen_k": 160,
        "head_dim": 64,
        "dtype": "float16",
    }
    base |= changes
    return AttentionShape(**({"head_dim_v": base["head_dim"]} | base))


def config_of(
    kernel: str, block_m: int = 64, block_n: int = 32, warps: int = 4, stages: int = 2, schedule: int = 0
) -> KernelConfig:
    return KernelConfig(kernel, block_m, block_n, warps, stages, (("schedule", schedule),))


def tensors(shape: AttentionShape, layout: str = "bhsd", seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, rows: int, dim: int) -> torch.Tensor:
        sizes = (shape.batch, heads, rows, dim) if layout == "bhsd" else (shape.batch, rows, heads, dim)
        tensor = torch.randn(sizes, generator=generator).to(getattr(torch, shape.dtype)).to(DEVICE)
        return tensor if layout == "bhsd" else tensor.transpose(1, 2)

    q = draw(shape.num_heads, shape.seqlen_q, shape.head_dim)
    k = draw(shape.num_heads_kv, shape.seqlen_k, shape.head_dim)
    v = draw(shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v)
    return q, k, v


def run(
    config: KernelConfig,
    shape: AttentionShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(q[..., :1].expand(*q.shape[:-1], shape.head_dim_v), float("nan"))
    lse = torch.full(q.shape[:-1], float("nan"), dtype=torch.float32, device=q.device)
    launch = get_kernel(config.kernel).bind(config, shape)
    launch(q, k, v, out, lse, shape.head_dim**-0.5 if scale is None else scale)
    return out, lse


def check(config: KernelConfig, shape: AttentionShape, layout: str = "bhsd", scale: float | None = None) -> None:
    assert not get_kernel(config.kernel).violations(config, shape, limits_for((9, 0)))
    q, k, v = tensors(shape, layout)
    out, lse = run(config, shape, q, k, v, scale)
    expected, expected_lse = attention_reference(q, k, v, causal=shape.causal, scale=scale, dtype=torch.float64)
    assert_close(out, lse, expected, expected_lse, shape.dtype)


def assert_close(
    out: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor, dtype: str
) -> None:
    assert torch.isfinite(out).all()
    assert (out.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    seen = ~expected_lse.isneginf()
    assert ((lse.double() - expected_lse)[seen].abs() <= LSE_TOLERANCE[dtype] * (1 + expected_lse[seen].abs())).all()


@pytest.mark.few(9)
@pytest.mark.parametrize(("kernel", "schedule", "causal"), list(product(PORTABLE, (0, 1, 2), Causal)))
def test_every_schedule_and_mask(kernel: str, schedule: int, causal: Causal) -> None:
    check(config_of(kernel, schedule=schedule), shape_of(seqlen_q=200, seqlen_k=256, causal=causal))


@pytest.mark.few(24)
@pytest.mark.parametrize(("kernel", "schedule"), list(product(PORTABLE, (0, 2))))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 77), (63, 65), (129, 31), (100, 300), (300, 100)])
@pytest.mark.parametrize("causal", Causal)
def test_ragged_lengths(kernel: str, schedule: int, seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    check(
        config_of(kernel, schedule=schedule),
        shape_of(num_heads=1, num_heads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal),
    )


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize(("block_m", "block_n"), [(64, 128), (128, 32), (256, 64), (64, 64)])
def test_diagonal_with_any_blocks(kernel: str, block_m: int, block_n: int) -> None:
    shape = shape_of(num_heads=1, num_heads_kv=1, seqlen_q=320, seqlen_k=320, head_dim=16, causal=Causal.UPPER_LEFT)
    check(config_of(kernel, block_m, block_n, schedule=2, stages=1), shape)


@pytest.mark.few(8)
@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(16, 16), (32, 32), (80, 80), (96, 96), (112, 112), (128, 64), (64, 96), (192, 128)]
)
def test_head_dimensions(kernel: str, head_dim: int, head_dim_v: int) -> None:
    check(config_of(kernel, schedule=1), shape_of(head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=70, seqlen_k=90))


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_data_types(kernel: str, dtype: str) -> None:
    for schedule in (0,) if dtype == "float32" else (0, 1, 2):
        check(config_of(kernel, schedule=schedule), shape_of(dtype=dtype, causal=Causal.UPPER_LEFT))


@pytest.mark.few(6)
@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (4, 4)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_grouped_heads_and_strides(kernel: str, heads: tuple[int, int], layout: str) -> None:
    shape = shape_of(
        batch=2,
        num_heads=heads[0],
        num_heads_kv=heads[1],
        seqlen_q=65,
        seqlen_k=66,
        head_dim=32,
        causal=Causal.LOWER_RIGHT,
    )
    check(config_of(kernel, schedule=2), shape, layout)


@pytest.mark.parametrize("kernel", PORTABLE)
def test_softmax_scale(kernel: str) -> None:
    check(config_of(kernel, schedule=2), shape_of(), scale=0.3)


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("growth", [2.0, 60.0])
def test_scores_that_grow_past_the_fixed_reference(kernel: str, growth: float, dtype: str) -> None:
    """Tiles are visited from the last to the first, and the keys get longer that way: with growth 60 the exponents
    leave the range of float32, so that the rows must be computed again."""
    shape = shape_of(seqlen_q=64, seqlen_k=256, dtype=dtype)
    q, k, v = tensors(shape)
    k = (k.float() * torch.linspace(growth, 0.1, 256, device=k.device)[:, None]).to(k.dtype)
    expected, expected_lse = attention_reference(q, k, v, dtype=torch.float64)
    out, lse = run(config_of(kernel, schedule=2), shape, q, k, v)
    assert_close(out, lse, expected, expected_lse, dtype)


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_very_negative_scores(kernel: str, schedule: int) -> None:
    shape = shape_of(seqlen_q=64, seqlen_k=100)
    q, k, v = tensors(shape)
    q, k = q.abs() * 8, -k.abs() * 8
    expected, expected_lse = attention_reference(q, k, v, dtype=torch.float64)
    out, lse = run(config_of(kernel, schedule=schedule), shape, q, k, v)
    assert_close(out, lse, expected, expected_lse, shape.dtype)


@pytest.mark.parametrize("kernel", PORTABLE)
def test_log_sum_exp_is_optional(kernel: str) -> None:
    shape = shape_of()
    q, k, v = tensors(shape)
    out = torch.full_like(q, float("nan"))
    get_kernel(kernel).bind(config_of(kernel), shape)(q, k, v, out, None, 0.125)
    expected, _ = attention_reference(q, k, v, scale=0.125, dtype=torch.float64)
    assert (out.double() - expected).norm() <= TOLERANCE[shape.dtype] * expected.norm()


@pytest.mark.few(4)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize(("dtype", "schedule"), [("float16", 0), ("float16", 1), ("float16", 2), ("float32", 0)])
def test_scores_whose_rounding_exceeds_every_exponent(dtype: str, schedule: int, causal: Causal) -> None:
    """Scores of 1e9 are 64 apart in float32: a fused product and difference leaves the row's own maximum an exponent of
    up to 32, and a probability that no 16-bit type holds, or none at all. The interpreter fuses nothing, but computes
    the rows again as a GPU does."""
    shape = shape_of(dtype=dtype, causal=causal, seqlen_q=80, seqlen_k=80, num_heads=1, num_heads_kv=1)
    sizes = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 1, "schedule": schedule}
    config = KernelConfig.of("flash_fwd", sizes)
    q, k, v = tensors(shape, "bhsd")
    q, k = q * 1e4, k * 1e4
    for scale in (1.0, 0.3):
        out, _ = run(config, shape, q, k, v, scale)
        expected, _ = attention_reference(q, k, v, causal=shape.causal, scale=scale, dtype=torch.float64)
        assert torch.isfinite(out).all()
        assert (out.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
