"""The dense backwards against float64 autograd: in Triton's interpreter on the CPU, compiled where a GPU is."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.backward.fused import BY_ATOMICS, BY_COPY_ENGINE
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tests.support.attention.feature_cases import WINDOWS, WORDS, extras_of, packed, shape_of, tensors
from tests.support.triton_modes import DEVICE, runs

SPLIT = KernelConfig.of(
    "flash_bwd_split",
    {"block_m": 32, "block_n": 64, "num_warps": 4, "num_stages": 1}
    | {"dq_block_m": 64, "dq_block_n": 32, "dq_num_warps": 4, "dq_num_stages": 1},
)
FUSED = KernelConfig.of(
    "flash_bwd_fused", {"block_m": 32, "block_n": 64, "num_warps": 4, "num_stages": 1, "reduce": BY_ATOMICS}
)
CONFIGS = pytest.mark.parametrize("config", [SPLIT, FUSED], ids=["split", "fused"])
# Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates; exponents that overflow under a
# soft cap give its bound, and NumPy warns about them.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
on_gpu = pytest.mark.gpu
# Relative Frobenius error against float64. dS is rounded to the data type before the last product, as is every result.
TOLERANCE = {"bfloat16": 8e-3, "float16": 1.2e-3, "float32": 1e-5}
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def backward(shape: AttentionShape) -> AttentionShape:
    return replace(shape, direction=Direction.BACKWARD)


def expected(
    shape: AttentionShape, qkv: Sequence[torch.Tensor], extras: Extras, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """Output, log-sum-exp and gradients by autograd of the float64 reference."""
    leaves = [tensor.double().requires_grad_() for tensor in qkv]
    features = replace(shape.features, deterministic=False)  # a matter of kernels
    out, lse = attention_reference(*leaves, causal=shape.causal, dtype=torch.float64, features=features, extras=extras)
    gradients = torch.autograd.grad(out, leaves, dout.double(), allow_unused=True, materialize_grads=True)
    return out.detach(), lse.detach(), gradients


def run(
    shape: AttentionShape, qkv: Sequence[torch.Tensor], extras: Extras, config: KernelConfig, *, seed: int = 9
) -> tuple[Gradients, Gradients]:
    """(the kernel's gradients, those expected)."""
    kernel, turned = get_kernel(config.kernel), backward(shape)
    assert not kernel.violations(config, turned, limits_for((9, 0)))
    generator = torch.Generator().manual_seed(seed)
    q = qkv[0]
    dout = torch.randn(*q.shape[:-1], shape.head_dim_v, generator=generator).to(q.dtype).to(DEVICE)
    out, lse, right = expected(shape, qkv, extras, dout)
    found = tuple(torch.full_like(tensor, float("nan")) for tensor in qkv)
    launch = kernel.bind(config, turned)
    arguments = (*qkv, out.to(q.dtype), lse.float().contiguous(), dout, *found, shape.head_dim**-0.5)
    launch(*arguments, *((extras,) if shape.features else ()))
    return found, right  # type: ignore[return-value]


def check(
    shape: AttentionShape,
    config: KernelConfig,
    qkv: Sequence[torch.Tensor] | None = None,
    extras: Extras | None = None,
) -> Gradients:
    """Compares with autograd, and returns the kernel's gradients."""
    qkv = tensors(shape) if qkv is None else qkv
    extras = extras_of(shape) if extras is None else extras
    found, right = run(shape, qkv, extras, config)
    for name, gradient, wanted in zip(("dq", "dk", "dv"), found, right, strict=True):
        assert torch.isfinite(gradient).all(), name
        scale = wanted.norm().clamp_min(1e-1 * wanted.numel() ** 0.5)  # it may cancel throughout
        error = float((gradient.double() - wanted).norm() / scale)
        assert error <= TOLERANCE[shape.dtype], f"{name}: {error}"
    return found


@runs
@CONFIGS
@pytest.mark.few(12)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(64, 64), (70, 90), (90, 40), (1, 33)])
def test_plain_shapes(config: KernelConfig, causal: Causal, seqlen_q: int, seqlen_k: int) -> None:
    check(shape_of("", causal=causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k), config)


@runs
@CONFIGS
@pytest.mark.few(10)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("features", WORDS)
def test_every_feature_alone(config: KernelConfig, features: str, causal: Causal) -> None:
    check(shape_of(features, causal=causal), config)


@runs
@CONFIGS
@pytest.mark.few(4)
@pytest.mark.parametrize(
    "features",
    ["window=20:9 softcap dropout", "softcap alibi boolean", "alibi additive dropout", "window=3:-1 additive"],
)
def test_features_together(config: KernelConfig, features: str) -> None:
    check(shape_of(features, causal=Causal.UPPER_LEFT, seqlen_k=60, dtype="float16"), config)


@runs
@CONFIGS
@pytest.mark.few(12)
@pytest.mark.parametrize(("window", "causal"), WINDOWS[::2])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 100), (20, 100), (100, 20)])
def test_windows(config: KernelConfig, window: tuple[int, int], causal: Causal, seqlen_q: int, seqlen_k: int) -> None:
    features = f"window={window[0]}:{window[1]}"
    check(shape_of(features, causal=causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=1), config)


@runs
@CONFIGS
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 24), (32, 48)])
def test_head_dimensions(config: KernelConfig, head_dim: int, head_dim_v: int) -> None:
    check(shape_of("alibi", head_dim=head_dim, head_dim_v=head_dim_v, dtype="float16"), config)


@runs
@CONFIGS
@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_grouped_heads_and_strides(config: KernelConfig, layout: str) -> None:
    shape = shape_of("boolean dropout alibi", batch=2, num_heads=4, num_heads_kv=2, causal="lower_right")
    check(shape, config, tensors(shape, layout))


@runs
@CONFIGS
@pytest.mark.few(8)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("others", ["", "window=20:9", "boolean", "alibi dropout"])
def test_packed_sequences(config: KernelConfig, others: str, causal: Causal) -> None:
    shape = shape_of(f"varlen {others}", batch=5, seqlen_q=70, seqlen_k=90, causal=causal)
    qkv, extras = packed(shape, (5, 70, 0, 33, 8), (90, 64, 7, 0, 2))
    dq, dk, _ = check(shape, config, qkv, extras)
    assert (dq[:, :, 75:108] == 0).all()  # queries of a sequence without keys
    assert (dk[:, :, 154:161] == 0).all()  # keys of a sequence without queries


@runs
@CONFIGS
def test_rows_that_see_no_key_have_no_gradient(config: KernelConfig) -> None:
    """Their log-sum-exp is -inf, and -inf minus -inf would be NaN in the recomputed probabilities."""
    mask = torch.ones(1, 1, 70, 90, dtype=torch.bool, device=DEVICE)
    mask[:, :, 3:66] = False
    dq, _, _ = check(shape_of("boolean"), config, extras=Extras(mask=mask))
    assert (dq[:, :, 3:66] == 0).all()
    bias = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, float("-inf"))
    check(shape_of("additive"), config, extras=Extras(mask=bias))
    check(shape_of("window=0:0", seqlen_k=30, causal="upper_left"), config)
    check(shape_of("", seqlen_k=30, causal="lower_right"), config)


@runs
@CONFIGS
def test_what_a_mask_holds_where_nobody_looks_changes_nothing(config: KernelConfig) -> None:
    shape = shape_of("additive", causal=Causal.UPPER_LEFT)
    bias = torch.randn(1, 1, 70, 90, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    hidden = torch.ones(70, 90, dtype=torch.bool, device=DEVICE).triu(1)
    right = check(shape, config, extras=Extras(mask=bias))
    poisoned = Extras(mask=bias.masked_fill(hidden, float("nan")))
    qkv = tensors(shape)
    kernel, lse = (
        get_kernel(config.kernel),
        attention_reference(
            *qkv, causal=shape.causal, dtype=torch.float64, features=shape.features, extras=Extras(mask=bias)
        ),
    )
    found = tuple(torch.full_like(tensor, float("nan")) for tensor in qkv)
    dout = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    kernel.bind(config, backward(shape))(
        *qkv, lse[0].float(), lse[1].float(), dout, *found, shape.head_dim**-0.5, poisoned
    )
    for gradient, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, wanted)


@runs
@CONFIGS
@pytest.mark.parametrize("features", ["", "softcap"])
def test_large_scores(config: KernelConfig, features: str) -> None:
    """Scores of a hundred: most probabilities underflow, none may overflow."""
    shape = shape_of(features, causal=Causal.LOWER_RIGHT)
    q, k, v = tensors(shape)
    check(shape, config, (q * 5, k * 5, v))


@runs
@CONFIGS
def test_a_gradient_that_is_one_value_for_all(config: KernelConfig) -> None:
    """`out.sum().backward()` hands in a gradient whose strides are all zero."""
    shape = shape_of("", head_dim=16)
    qkv = tensors(shape)
    out, lse, right = expected(shape, qkv, NO_EXTRAS, torch.ones_like(qkv[0]))
    dout = torch.ones((), device=DEVICE).expand(qkv[0].shape)
    found = tuple(torch.empty_like(tensor) for tensor in qkv)
    launch = get_kernel(config.kernel).bind(config, backward(shape))
    launch(*qkv, out.float(), lse.float(), dout, *found, shape.head_dim**-0.5)
    for gradient, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(gradient.double(), wanted, atol=1e-5, rtol=1e-4)


def test_the_split_form_alone_is_deterministic() -> None:
    shape, limits = backward(shape_of("deterministic")), limits_for((9, 0))
    assert get_kernel("flash_bwd_split").unsupported(shape, limits) is None
    assert "does not know deterministic" in str(get_kernel("flash_bwd_fused").unsupported(shape, limits))


def test_the_copy_engine_has_rules() -> None:
    fused, shape = get_kernel("flash_bwd_fused"), backward(shape_of("", head_dim=64, dtype="float16"))
    config = KernelConfig.of("flash_bwd_fused", FUSED.parameters | {"reduce": BY_COPY_ENGINE})
    assert not fused.violations(config, shape, limits_for((9, 0)))
    assert "needs compute capability 9.0" in fused.violations(config, shape, limits_for((8, 0)))[0]
    odd = replace(shape, head_dim=50)
    assert "head_dim % 4 == 0, but got 50" in fused.violations(config, odd, limits_for((9, 0)))[0]


@CONFIGS
@pytest.mark.parametrize(
    ("features", "extras", "message"),
    [
        ("boolean", NO_EXTRAS, "missing or superfluous: mask"),
        ("softcap", NO_EXTRAS, "`softcap > 0` must hold, but got softcap=0.0"),
        ("dropout", Extras(dropout_p=1.0), "`0 <= dropout_p < 1` must hold"),
    ],
)
def test_extras_that_do_not_fit_are_refused(config: KernelConfig, features: str, extras: Extras, message: str) -> None:
    shape = shape_of(features)
    q, k, v = tensors(shape)
    lse = torch.zeros(q.shape[:-1])
    launch = get_kernel(config.kernel).bind(config, backward(shape))
    with pytest.raises(UsageError, match=message):
        launch(q, k, v, q, lse, q, q, k, v, 1.0, extras)


SIZES = [("", 2048, 2048), ("", 1000, 777), ("window=256:0", 2048, 2048), ("window=100:300", 1000, 2048)]
SIZES += [("softcap", 2048, 1500), ("alibi", 1024, 2048), ("boolean", 777, 1024), ("additive", 1024, 777)]
SIZES += [("dropout", 2048, 2048), ("window=512:512 softcap alibi dropout", 2000, 2000)]
DIMS = [(64, "bfloat16"), (64, "float16"), (96, "bfloat16"), (128, "bfloat16"), (128, "float16"), (256, "bfloat16")]


def default(name: str, shape: AttentionShape, **changes: Any) -> KernelConfig:
    limits = limits_for(torch.cuda.get_device_capability())
    config = get_kernel(name).default_config(backward(shape), limits)
    return KernelConfig.of(name, config.parameters | changes)


NAMES = pytest.mark.parametrize("name", ["flash_bwd_split", "flash_bwd_fused"])


@pytest.mark.gpu
@on_gpu
@NAMES
@pytest.mark.parametrize(("head_dim", "dtype"), DIMS)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("features", "seqlen_q", "seqlen_k"), SIZES)
def test_real_sizes(
    name: str, features: str, seqlen_q: int, seqlen_k: int, causal: Causal, dtype: str, head_dim: int
) -> None:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = shape_of(features, **sizes, head_dim=head_dim, dtype=dtype, causal=causal)
    check(shape, default(name, shape), tensors(shape, "bshd"))


@pytest.mark.gpu
@on_gpu
@NAMES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("features", ["varlen", "varlen dropout window=128:0", "varlen alibi softcap"])
def test_real_packed_sequences(name: str, features: str, head_dim: int) -> None:
    sizes = {"batch": 6, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 2048, "seqlen_k": 1500}
    shape = shape_of(features, **sizes, head_dim=head_dim, dtype="bfloat16", causal=Causal.LOWER_RIGHT)
    qkv, extras = packed(shape, (17, 2048, 0, 500, 64, 1), (1500, 1300, 64, 0, 65, 999))
    changes = [{}] if name == "flash_bwd_split" else [{"reduce": BY_ATOMICS}, {"reduce": BY_COPY_ENGINE}]
    for change in changes:
        check(shape, default(name, shape, **change), qkv, extras)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("blocks", list(product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2))))
@pytest.mark.parametrize("features", ["", "window=200:100 softcap dropout"])
def test_every_block(features: str, blocks: tuple[int, int, int, int]) -> None:
    """Each in both passes of the split form, and in both ways of the fused one."""
    shape = shape_of(features, seqlen_q=500, seqlen_k=700, head_dim=64, dtype="bfloat16")
    names = ("block_m", "block_n", "num_warps", "num_stages")
    block_m, block_n, warps, stages = blocks
    own = dict(zip(names, blocks, strict=True))
    queries = {"dq_block_m": block_n, "dq_block_n": block_m, "dq_num_warps": warps, "dq_num_stages": stages}
    if block_m in get_kernel("flash_bwd_split").parameters["block_m"]:
        check(shape, KernelConfig.of("flash_bwd_split", own | queries))
    for reduce in (BY_ATOMICS, BY_COPY_ENGINE):
        check(shape, KernelConfig.of("flash_bwd_fused", own | {"reduce": reduce}))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("features", ["deterministic", "deterministic dropout window=300:20"])
def test_deterministic_gradients_are_equal_to_the_bit(features: str) -> None:
    plain = Features.parse(features)
    shape = shape_of(features, batch=2, num_heads=8, seqlen_q=2000, seqlen_k=2000, head_dim=64, dtype="bfloat16")
    assert plain.deterministic
    qkv, extras = tensors(shape), extras_of(shape)
    first, again = (run(shape, qkv, extras, default("flash_bwd_split", shape))[0] for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
