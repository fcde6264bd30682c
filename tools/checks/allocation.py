"""The memory that the compiler gives a launch, found without making machine code, which is the slower half."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.limits import WARP_SIZE, limits_for
from blocktune.tuner.compile.compiler import options_of, source_of


class _Allocated(Exception):
    """Ends a compile where memory has been allocated."""


def allocated_by(spec: CompileSpec, cc: tuple[int, int]) -> tuple[int, int]:
    """Return the shared memory in bytes and the columns of tensor memory that the compiler gives a launch.

    Triton's own module is changed meanwhile, so this belongs to a process that compiles one thing at a time.

    Raises:
        triton.errors.TritonError: the compiler rejects the config.
        RuntimeError: a pass of the compiler failed.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    source, target = source_of(spec), GPUTarget("cuda", limits_for(cc).sm_arch, WARP_SIZE)
    backend = make_backend(target)
    options = backend.parse_options(options_of(spec) | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, functions, modules, context)
    metadata = {"hash": "", "target": target} | options.__dict__
    for stage in ("ttir", "ttgir"):  # Gluon's code begins with the second
        module = stages[stage](module, metadata) if stage in stages else module
    with _ends_with_the_allocation():
        try:
            stages["llir"](module, metadata)
        except _Allocated as ended:
            (passes,) = ended.args
            passes.run(module, "allocate")
    return module.get_int_attr("ttg.shared") or 0, module.get_int_attr("ttg.tensor_memory_size") or 0


@contextmanager
def _ends_with_the_allocation() -> Iterator[None]:
    """Have the pass that follows those which allocate end the compile."""
    from triton.backends.nvidia.compiler import nvidia

    passes = nvidia.passes.ttnvgpuir
    add, passes.add_proxy_fence_insertion = passes.add_proxy_fence_insertion, _stop
    try:
        yield
    finally:
        passes.add_proxy_fence_insertion = add


def _stop(passes: Any, capability: int) -> None:
    raise _Allocated(passes)
