"""An offline compile fills Triton's cache under the key that a launch looks up: no GPU is needed to compare them."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.kernel import CompileSpec
from blocktune.tuner.resources import compile_key, options_of, source_of


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    import compile_fakes

    return compile_fakes


def launch_key(function: Any, sm_arch: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """The key that `function[grid](*arguments, **options)` looks up on such a GPU, by the JIT's own steps."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", sm_arch, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    keywords = options | {"debug": False, "instrumentation_mode": ""}  # what JITFunction.run adds
    bound, specialization, _ = bind(*arguments, **keywords)
    parsed, signature, constants, attributes = function._pack_args(backend, keywords, bound, specialization, None)
    source = ASTSource(function, signature, constants, attributes)
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
