"""An offline compile fills Triton's cache under the key that a launch looks up: no GPU is needed to compare them."""

import hashlib
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.decode import kernel as flash_decode_hopper
from blocktune.kernels.hopper.forward import launch as flash_fwd_hopper
from blocktune.kernels.hopper.forward.short import kernel as flash_fwd_hopper_short
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.compile.compiler import compile_key, options_of, source_of
from blocktune.tuner.compile.with_lse import with_lse
from tests.support.triton_modes import compiled_here

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def zeros(device: Any) -> torch.Tensor:
    """A counter that belongs to no CUDA stream."""
    return torch.zeros(2, dtype=torch.int32, device=device)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from tests.support.fakes import compile_fakes

    return compile_fakes


def launch_key(function: Any, sm_arch: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """The key that `function[grid](*arguments, **options)` looks up on such a GPU, by the JIT's own steps."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.cache import get_cache_key
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", sm_arch, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    keywords = options | {"debug": False, "instrumentation_mode": ""}  # what JITFunction.run adds
    bound, specialization, _ = bind(*arguments, **keywords)
    parsed, signature, constants, attributes = function._pack_args(backend, keywords, bound, specialization, None)
    source = (GluonASTSource if function.is_gluon() else ASTSource)(function, signature, constants, attributes)
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)])
def test_compile_key_is_the_launch_s(fakes: Any, cc: tuple[int, int]) -> None:
    config = fakes.config("product")
    spec = fakes.get_kernel("product").compile_spec(config, fakes.SHAPE)
    a, b = (torch.empty(64, 64, dtype=torch.float16) for _ in range(2))
    arguments = (a, b, torch.empty(64, 64), 64, config.block_m, config.block_n, 64)
    sm_arch = 10 * cc[0] + cc[1]
    assert compile_key(spec, cc) == launch_key(fakes.product_kernel, sm_arch, arguments, dict(spec.options))
    odd = (*arguments[:3], 63, *arguments[4:])  # not divisible by 16: other code
    assert compile_key(spec, cc) != launch_key(fakes.product_kernel, sm_arch, odd, dict(spec.options))


def test_compile_key_is_the_one_that_the_compiler_uses(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec: CompileSpec = fakes.get_kernel("product").compile_spec(fakes.config("product"), fakes.SHAPE)
    compiled = triton_compile(source_of(spec), target=GPUTarget("cuda", 80, 32), options=options_of(spec))
    assert compiled.hash == compile_key(spec, (8, 0))


def test_compile_key_changes_with_what_changes_the_code(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fakes.get_kernel("product")
    spec = kernel.compile_spec(fakes.config("product"), fakes.SHAPE)
    keys = [
        compile_key(spec, (9, 0)),
        compile_key(spec, (8, 0)),
        compile_key(kernel.compile_spec(fakes.config("product", block_m=128), fakes.SHAPE), (9, 0)),
        compile_key(kernel.compile_spec(fakes.config("product", num_warps=8), fakes.SHAPE), (9, 0)),
    ]
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    keys.append(compile_key(spec, (9, 0)))
    assert len(set(keys)) == 5


def problem(**changes: Any) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 128, "seqlen_k": 128}
    return AttentionShape(**sizes | {"head_dim": 64, "head_dim_v": 64} | changes)


SHAPES = (
    problem(),
    problem(seqlen_q=100, seqlen_k=77),  # lengths that 16 does not divide
    problem(batch=1, num_heads=1, num_heads_kv=1),  # sizes of 1, which the JIT takes as constants
    problem(seqlen_q=1),
    problem(head_dim=80, head_dim_v=80, causal=Causal.UPPER_LEFT, dtype="float16"),
)
SUPPORTED = [
    pytest.param(shape, name, id=f"{shape.label}-{name}")
    for shape, (name, kernel) in product(SHAPES, KERNELS.items())
    if kernel.unsupported(shape, limits_for((9, 0))) is None
]


@compiled_here
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("shape", "name"), SUPPORTED)
def test_compile_spec_of_every_kernel_is_its_launch_s(
    name: str, shape: AttentionShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = KERNELS[name]
    for module in (flash_fwd_hopper, flash_fwd_hopper_short):
        monkeypatch.setattr(module, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32, device=device))
    monkeypatch.setattr(
        flash_decode_hopper,
        "scratch",
        lambda device, counters, floats: (torch.empty(floats), torch.zeros(counters, dtype=torch.int32)),
    )
    config = kernel.default_config(shape, limits_for((9, 0)))
    launch: Any = kernel.bind(config, shape)
    query, key, value, out = tensors(shape)
    arguments = launch.arguments(query, key, value, out, None, 1.0)
    expected = launch_key(launch.function, 90, arguments, dict(launch.options))
    spec = kernel.compile_spec(config, shape)
    assert compile_key(spec, (9, 0)) == expected
    writing = with_lse(spec)
    if writing is not None and config.parameters.get("splits", 1) == 1:  # of splits, what merges them writes it
        arguments = launch.arguments(query, key, value, out, torch.empty(out.shape[:3]), 1.0)
        assert compile_key(writing, (9, 0)) == launch_key(launch.function, 90, arguments, dict(launch.options))


@compiled_here
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize(
    "features", ["window=9:3", "softcap", "varlen window=9:0 softcap", "alibi", "dropout", "varlen alibi"]
)
def test_compile_spec_with_features_is_the_hopper_launch_s(
    features: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        flash_fwd_hopper, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32, device=device)
    )
    asked = Features.parse(features)
    shape = problem(batch=1, seqlen_k=77, head_dim=head_dim, head_dim_v=head_dim, features=asked)
    kernel = KERNELS["flash_fwd_hopper"]
    config = kernel.default_config(shape, limits_for((9, 0)))
    launch: Any = kernel.bind(config, shape)
    lengths = torch.tensor([0, 77], dtype=torch.int32) if asked.varlen else None
    given: dict[str, Any] = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "dropout_p": 0.5 * asked.dropout}
    extras = Extras(**given, softcap=float(asked.softcap), alibi_slopes=torch.ones(1, 4) if asked.alibi else None)
    arguments = launch.arguments(*tensors(shape), None, 1.0, extras)
    expected = launch_key(launch.function, 90, arguments, dict(launch.options))
    assert compile_key(kernel.compile_spec(config, shape), (9, 0)) == expected


def tensors(shape: AttentionShape) -> tuple[torch.Tensor, ...]:
    """Contiguous q, k, v and output."""
    dtype = getattr(torch, shape.dtype)
    queries, keys = (shape.num_heads, shape.seqlen_q), (shape.num_heads_kv, shape.seqlen_k)
    q, out = (torch.empty(shape.batch, *queries, dim, dtype=dtype) for dim in (shape.head_dim, shape.head_dim_v))
    k, v = (torch.empty(shape.batch, *keys, dim, dtype=dtype) for dim in (shape.head_dim, shape.head_dim_v))
    return q, k, v, out
