"""What Triton's JIT would compile for given arguments, found without launching anything.

The JIT turns the arguments of a launch into a signature, constants and attributes (an integer divisible by 16, an
aligned pointer), and these name the code in Triton's cache. Their exact form differs between versions of Triton, so it
is asked of the JIT itself rather than written down a second time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from blocktune.kernels.kernel import CompileSpec


def specialised(function: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> CompileSpec:
    """The compilation that `function[grid](*arguments, **options)` asks for.

    Tensors may be stand-ins: torch's `meta` tensors or Triton's `MockTensor`, which count as aligned to 16 bytes.

    Args:
        function: a `triton.jit` function.
        arguments: the launch's arguments in order, constants included.
        options: the launch's options, such as num_warps and num_stages.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))  # how arguments are specialised is the same on every GPU
    keywords = {"enable_fp_fusion": True} | dict(options)  # stated here only because Triton 3.9 warns where it is open
    bound, specialization, _ = create_function_from_signature(function.signature, function.params, backend)(
        *arguments, **keywords
    )
    _, signature, constants, attributes = function._pack_args(backend, keywords, bound, specialization, None)
    return CompileSpec(function, signature, constants, attributes, options)
