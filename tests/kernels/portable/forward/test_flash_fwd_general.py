"""The general forward against the float64 reference: in Triton's interpreter on the CPU, compiled where a GPU is."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.attention.feature_cases import PAIRS, WINDOWS, WORDS, extras_of, packed, shape_of, tensors
from tests.support.triton_modes import DEVICE, runs

KERNEL = get_kernel("flash_fwd_general")
CONFIG = KernelConfig("flash_fwd_general", 64, 32, 4, 2)
# Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates; exponents that overflow under a
# soft cap give its bound, and NumPy warns about them.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
# Relative Frobenius error against float64; see test_flash_fwd.py.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-6}
LSE_TOLERANCE = {"bfloat16": 1e-4, "float16": 1e-4, "float32": 1e-5}


def run(
    shape: AttentionShape, qkv: Sequence[torch.Tensor], extras: Extras, config: KernelConfig = CONFIG
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = qkv
    assert not KERNEL.violations(config, shape, limits_for((9, 0)))
    out = torch.full((*q.shape[:-1], shape.head_dim_v), float("nan"), dtype=q.dtype, device=DEVICE)
    sizes = q.shape[1:-1] if shape.features.varlen else q.shape[:-1]
    lse = torch.full(sizes, float("nan"), dtype=torch.float32, device=DEVICE)
    KERNEL.bind(config, shape)(q, k, v, out, lse, shape.head_dim**-0.5, extras)
    return out, lse


def check(
    shape: AttentionShape,
    qkv: Sequence[torch.Tensor] | None = None,
    extras: Extras | None = None,
    config: KernelConfig = CONFIG,
) -> torch.Tensor:
    """Compares with the reference, and returns the kernel's log-sum-exp."""
    qkv = tensors(shape) if qkv is None else qkv
    extras = extras_of(shape) if extras is None else extras
    out, lse = run(shape, qkv, extras, config)
    expected, expected_lse = attention_reference(
        *qkv, causal=shape.causal, dtype=torch.float64, features=shape.features, extras=extras
    )
    assert torch.isfinite(out).all()
    assert (out.double() - expected).norm() <= TOLERANCE[shape.dtype] * expected.norm()
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert (out[expected_lse.view(out.shape[:-1]).isneginf()] == 0).all()
    seen = ~expected_lse.isneginf()
    error = (lse.double() - expected_lse)[seen].abs()
    assert (error <= LSE_TOLERANCE[shape.dtype] * (1 + expected_lse[seen].abs())).all()
    return lse


@runs
@pytest.mark.few(14)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("features", WORDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 90), (90, 40)])
def test_every_feature_alone(features: str, causal: Causal, seqlen_q: int, seqlen_k: int) -> None:
    check(shape_of(features, causal=causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k))


@runs
@pytest.mark.few(12)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("features", PAIRS)
def test_every_pair_of_features(features: str, causal: Causal) -> None:
    check(shape_of(features, causal=causal, dtype="float16"))


@runs
@pytest.mark.few(12)
@pytest.mark.parametrize(("window", "causal"), WINDOWS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 100), (20, 100), (100, 20)])
def test_windows(window: tuple[int, int], causal: Causal, seqlen_q: int, seqlen_k: int) -> None:
    features = f"window={window[0]}:{window[1]}"
    check(shape_of(features, causal=causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=1))


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 77), (63, 65), (64, 32), (33, 100)])
@pytest.mark.parametrize("features", ["window=20:9 softcap", "boolean dropout", "alibi"])
def test_ragged_lengths(features: str, seqlen_q: int, seqlen_k: int) -> None:
    check(shape_of(features, num_heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=Causal.LOWER_RIGHT))


@runs
@pytest.mark.parametrize(("block_m", "block_n"), [(64, 128), (128, 32), (128, 128)])
@pytest.mark.parametrize("features", ["window=20:9", "additive"])
def test_other_blocks(features: str, block_m: int, block_n: int) -> None:
    shape = shape_of(features, num_heads=1, seqlen_q=150, seqlen_k=150)
    check(shape, config=replace(CONFIG, block_m=block_m, block_n=block_n))


@runs
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 24), (80, 48), (32, 64)])
def test_head_dimensions(head_dim: int, head_dim_v: int) -> None:
    check(shape_of("window=20:9 alibi", head_dim=head_dim, head_dim_v=head_dim_v, dtype="float16"))


@runs
@pytest.mark.few(3)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_grouped_heads_and_strides(heads: tuple[int, int], layout: str) -> None:
    shape = shape_of("boolean dropout alibi", batch=2, num_heads=heads[0], num_heads_kv=heads[1], causal="lower_right")
    check(shape, tensors(shape, layout))


@runs
@pytest.mark.few(8)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("sizes", list(product((1, 2), (1, 2), (1, 70))))
def test_masks_are_broadcast_and_strided(kind: str, sizes: tuple[int, int, int]) -> None:
    shape = shape_of(kind, batch=2)
    drawn = torch.randn(90, *sizes, generator=torch.Generator().manual_seed(3)).to(DEVICE).permute(1, 2, 3, 0)
    check(shape, extras=Extras(mask=drawn > 0 if kind == "boolean" else drawn))


@runs
def test_rows_that_see_no_key() -> None:
    mask = torch.ones(1, 1, 70, 90, dtype=torch.bool, device=DEVICE)
    mask[:, :, 3:66] = False
    lse = check(shape_of("boolean"), extras=Extras(mask=mask))
    assert lse.isneginf().sum() == 2 * 63
    bias = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, float("-inf"))
    assert torch.equal(check(shape_of("additive"), extras=Extras(mask=bias)).isneginf(), lse.isneginf())
    assert check(shape_of("window=0:0", seqlen_k=30, causal="upper_left")).isneginf().sum() == 2 * 40


@runs
@pytest.mark.parametrize("hidden", [-1e4, -1e9, -1e30, torch.finfo(torch.float32).min])
def test_additive_masks_that_hide_with_finite_numbers(hidden: float) -> None:
    """Also in a row's first tiles, before any key that it sees; and then the row's sum starts with what is hidden."""
    mask = torch.zeros(1, 1, 70, 90, device=DEVICE)
    mask[..., :65] = hidden
    check(shape_of("additive", dtype="float16"), extras=Extras(mask=mask))


@runs
@pytest.mark.parametrize("features", ["window=20:9", "softcap", "alibi"])
def test_very_negative_scores(features: str) -> None:
    shape = shape_of(features, dtype="float16")
    q, k, v = tensors(shape)
    check(shape, (q.abs() * 8, -k.abs() * 8, v))


@runs
def test_dropout_leaves_the_log_sum_exp_alone() -> None:
    shape = shape_of("dropout")
    other = replace(extras_of(shape), dropout_p=0.9, seed=3)
    assert torch.equal(check(shape), check(shape, extras=other))


@runs
@pytest.mark.few(8)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("others", ["", "window=20:9", "boolean", "softcap additive", "alibi dropout"])
def test_packed_sequences(others: str, causal: Causal) -> None:
    lengths_q, lengths_k = (5, 70, 0, 33, 8), (90, 64, 7, 0, 2)
    shape = shape_of(f"varlen {others}", batch=5, seqlen_q=70, seqlen_k=90, causal=causal)
    qkv, extras = packed(shape, lengths_q, lengths_k)
    lse = check(shape, qkv, extras)
    assert lse[:, 75:108].isneginf().all()  # queries of a sequence without keys


@runs
def test_packed_sequences_are_computed_like_single_ones() -> None:
    shape = shape_of("varlen", batch=2, causal=Causal.LOWER_RIGHT)
    (q, k, v), extras = packed(shape, (30, 70), (90, 40))
    out, lse = run(shape, (q, k, v), extras)
    single = shape_of("varlen", batch=1, seqlen_k=40, causal=Causal.LOWER_RIGHT)
    own = replace(packed(single, (70,), (40,))[1])
    own_out, own_lse = run(single, (q[:, :, 30:], k[:, :, 90:], v[:, :, 90:]), own)
    assert torch.equal(out[:, :, 30:], own_out)
    assert torch.equal(lse[:, 30:], own_lse)


@pytest.mark.parametrize(
    ("features", "extras", "message"),
    [
        ("boolean", NO_EXTRAS, "missing or superfluous: mask"),
        ("alibi varlen", NO_EXTRAS, "missing or superfluous: alibi_slopes, cu_seqlens_q, cu_seqlens_k"),
        ("softcap", NO_EXTRAS, "`softcap > 0` must hold, but got softcap=0.0"),
        ("softcap", Extras(softcap=1.0, mask=torch.ones(1)), "missing or superfluous: mask"),
        ("dropout", Extras(dropout_p=1.0), "`0 <= dropout_p < 1` must hold"),
    ],
)
def test_extras_that_do_not_fit_are_refused(features: str, extras: Extras, message: str) -> None:
    shape = shape_of(features)
    q, k, v = tensors(shape)
    with pytest.raises(UsageError, match=message):
        KERNEL.bind(CONFIG, shape)(q, k, v, torch.empty_like(q), None, 1.0, extras)


def test_it_leaves_plain_shapes_and_other_features_alone() -> None:
    limits = limits_for((9, 0))
    assert "is for shapes with features" in str(KERNEL.unsupported(shape_of(""), limits))
    assert KERNEL.unsupported(shape_of("softcap"), limits) is None
    assert "does not know block_sparse" in str(KERNEL.unsupported(shape_of("block_sparse"), limits))
    assert "does not know kv=e4m3" in str(KERNEL.unsupported(shape_of("cached page=16 kv=e4m3"), limits))
    assert "head_dim=512" in str(KERNEL.unsupported(shape_of("softcap", head_dim=512), limits))
    assert "shared memory of the smallest blocks" in str(
        KERNEL.unsupported(shape_of("softcap", head_dim=256), limits_for((7, 5)))
    )


BLOCKS = list(product((64, 128), (32, 64, 128), (4, 8), (1, 3)))
LONG = [
    ("window=256:0", 2048, 2048),
    ("window=100:300", 1000, 2048),
    ("softcap", 2048, 1500),
    ("alibi", 1024, 2048),
    ("boolean", 777, 1024),
    ("additive", 1024, 777),
    ("dropout", 2048, 2048),
    ("window=512:512 softcap alibi dropout", 2000, 2000),
]


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("features", "seqlen_q", "seqlen_k"), LONG)
def test_real_sizes(features: str, seqlen_q: int, seqlen_k: int, causal: Causal, dtype: str, head_dim: int) -> None:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = shape_of(features, **sizes, head_dim=head_dim, dtype=dtype, causal=causal)
    limits = limits_for(torch.cuda.get_device_capability())
    check(shape, tensors(shape, "bshd"), config=KERNEL.default_config(shape, limits))


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("features", ["varlen", "varlen dropout window=128:0"])
def test_real_packed_sequences(features: str, dtype: str, head_dim: int) -> None:
    shape = shape_of(features, batch=6, num_heads=4, num_heads_kv=2, seqlen_q=2048, seqlen_k=1500, head_dim=head_dim)
    shape = replace(shape, dtype=dtype, causal=Causal.LOWER_RIGHT)
    qkv, extras = packed(shape, (17, 2048, 0, 500, 64, 1), (1500, 1300, 64, 0, 65, 999))
    check(shape, qkv, extras, KERNEL.default_config(shape, limits_for(torch.cuda.get_device_capability())))


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("block_m", "block_n", "warps", "stages"), BLOCKS)
@pytest.mark.parametrize("features", ["window=200:100 softcap", "boolean dropout"])
def test_every_config(features: str, block_m: int, block_n: int, warps: int, stages: int) -> None:
    shape = shape_of(features, seqlen_q=500, seqlen_k=700, head_dim=64, dtype="bfloat16")
    check(shape, config=KernelConfig("flash_fwd_general", block_m, block_n, warps, stages))
