"""Compiles one config, with or without a GPU, and reads what it takes from a multiprocessor.

The compile fills Triton's disk cache under the very key that a later launch looks up. Triton's key is made of its own
build, the source's hash (function, signature, attributes, constants), the backend's hash (ptxas version and
architecture), the options' hash and the environment variables that Triton names. A `CompileSpec` states signature,
attributes, constants and options as the JIT derives them from the tensors, so a launch on a GPU of that architecture
compiles nothing (`tests/tuner/compile/test_compile_key.py`).
"""

import contextlib
import hashlib
import inspect
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic

from blocktune.db.records.records import ConfigT, Outcome
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.hardware.limits import WARP_SIZE, limits_for
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader import provenance
from blocktune.tuner.compile.answers import Compiled, failed_answer
from blocktune.tuner.compile.cubin import code_sha256, usage_of
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses, shared_accesses

if TYPE_CHECKING:
    from triton.compiler import ASTSource

_MATRIX_INSTRUCTIONS = (("tcgen05.mma", "tcgen05"), ("wgmma.mma_async", "wgmma"), ("mma.sync", "mma"))
_NAMED_BARRIER = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|arrive|red)\S*\s+(\d+|%\w+)")
_SPILL_STORES = re.compile(r"(\d+) bytes spill stores")
_BARRIERS_USED = re.compile(r"used (\d+) barriers")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult(Compiled, Generic[ConfigT]):
    """How the compile of a config ended.

    shared: how its loop reads shared memory; None unless the outcome is `OK`. cached: looked up.
    """

    config: ConfigT
    shared: SharedAccesses | None = None
    cached: bool = False

    @property
    def code(self) -> CompiledCode | None:
        """The code; None unless the outcome is `OK`."""
        return None if self.resources is None else CompiledCode(self.resources, self.shared)


def compile_config(
    kernel: AttentionKernel,
    config: KernelConfig,
    shape: AttentionShape,
    cc: tuple[int, int],
    logs: Sequence[str] = (),
) -> tuple[KernelResources, SharedAccesses]:
    """Compile in this process, or take the code from Triton's cache. Needs no GPU.

    All that the config launches is compiled; resources and accesses are those of `compile_spec`'s function.

    A compile may take minutes or abort the process; `CompileFarm` compiles where that is harmless. logs: the
    list that `ptxas_logs` fills meanwhile, which spares a second run of ptxas.

    Raises:
        triton.errors.TritonError: the compiler rejects the config; `OutOfResources` if the code needs more tensor
            memory than there is.
        RuntimeError: a pass of the compiler failed.
    """
    for spec in kernel.further_specs(config, shape):
        compiled_code(spec, cc)
    heard = len(logs)
    compiled = compiled_code(kernel.compile_spec(config, shape), cc)
    return resources_of(compiled, "\n".join(logs[heard:])), shared_accesses(compiled.asm["ptx"])


def compiled_code(spec: CompileSpec, cc: tuple[int, int]) -> Any:
    """Return Triton's compiled kernel of a spec; raises what `compile_config` raises."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    limits = limits_for(cc)
    target = GPUTarget("cuda", limits.sm_arch, WARP_SIZE)
    compiled = triton_compile(source_of(spec), target=target, options=options_of(spec))
    _check_tensor_memory(compiled.metadata, limits.tensor_memory_columns)
    return compiled


def compile_here(spec: CompileSpec, cc: tuple[int, int]) -> Compiled:
    """Return how the compile of a spec by this process ended; code that Triton has on disk is only read."""
    started = time.perf_counter()
    try:
        found = resources_of(compiled_code(spec, cc))
    except Exception as error:  # compilers raise what they like
        return Compiled.of_answer(failed_answer(error) | {"seconds": time.perf_counter() - started})
    return Compiled(outcome=Outcome.OK, resources=found, seconds=time.perf_counter() - started)


def hash_triton() -> None:
    """Have Triton hash all of its own files, which the first key of a process would wait for."""
    from triton.runtime.cache import triton_key

    triton_key()


def source_of(spec: CompileSpec) -> "ASTSource":
    """Return Triton's own form of what to compile."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    if isinstance(spec.function, GluonJITFunction):
        return GluonASTSource(spec.function, dict(spec.signature), dict(spec.constexprs), dict(spec.attrs))
    return ASTSource(spec.function, dict(spec.signature), dict(spec.constexprs), dict(spec.attrs))


def options_of(spec: CompileSpec) -> dict[str, Any]:
    """Return the spec's options, with the fusion of multiply and add stated.

    Triton 3.9 warns at the first compile that leaves it open, because 3.10 changes the default. Stating the value that
    the JIT would take keeps the cache key; setting TRITON_DEFAULT_FP_FUSION, as the warning proposes, would change it.
    """
    from triton import knobs

    return {"enable_fp_fusion": knobs.language.default_fp_fusion} | dict(spec.options)


def compile_key(spec: CompileSpec, cc: tuple[int, int]) -> str:
    """Return the name under which Triton keeps this code on disk, 64 hexadecimal digits.

    It changes with the device code, Triton, ptxas, architecture, signature, constants and options: with all that the
    resources depend on, and with nothing else.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(GPUTarget("cuda", limits_for(cc).sm_arch, WARP_SIZE))
    options = backend.parse_options(options_of(spec))
    key = get_cache_key(source_of(spec), backend, options, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def has_code(spec: CompileSpec, key: str) -> bool:
    """Return whether Triton's disk cache holds the code of this key, so that a launch compiles nothing."""
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(key).get_group(f"{spec.function.__name__[:150]}.json") is not None


def ptxas_version(cc: tuple[int, int]) -> str:
    """Return the version of the assembler that Triton uses for this compute capability, such as `12.8.93`; empty
    without one."""
    return provenance.ptxas_version(limits_for(cc).sm_arch)


def tensor_cores_in(ptx: str) -> str:
    """Return the instruction of the matrix products in assembly: `tcgen05`, `wgmma`, `mma` or `none`."""
    return next((name for instruction, name in _MATRIX_INSTRUCTIONS if instruction in ptx), "none")


def _check_tensor_memory(metadata: Any, columns: int) -> None:
    from triton.runtime.errors import OutOfResources

    needed = getattr(metadata, "tmem_size", None) or 0
    if needed > columns:
        raise OutOfResources(needed, columns, "tensor memory")


def resources_of(compiled: Any, log: str = "") -> KernelResources:
    """Return what compiled code takes from a multiprocessor.

    Args:
        compiled: Triton's compiled kernel.
        log: of ptxas from when it was compiled, where that is known; ptxas is else run again where its log is needed.
    """
    from triton import knobs

    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    usage = usage_of(compiled.asm["cubin"], metadata.target.arch, knobs.nvidia.cuobjdump.path)
    spill_bytes, barriers = _spills_and_barriers(compiled, usage.stack_bytes, log)
    return KernelResources(
        registers=usage.registers,
        shared_bytes=metadata.shared,
        static_shared_bytes=usage.static_shared_bytes,
        stack_bytes=usage.stack_bytes,
        spill_bytes=spill_bytes,
        num_warps=metadata.num_warps,
        barriers=barriers,
        tensor_cores=tensor_cores_in(ptx),
        code_sha256=code_sha256(compiled.asm["cubin"]),
    )


def _spills_and_barriers(compiled: Any, stack_bytes: int, log: str) -> tuple[int, int]:
    """Return the bytes of spill stores per thread, and the barriers per block.

    Only the log of `ptxas -v` has them. Without that of the compile it costs a second run of ptxas (5 to 25 % of a
    compile, and half of one that spills much), so it is made only where the answer is not certain: without a stack
    there is no spill, and code that names no barrier but number 0 uses one.
    """
    named = set(_NAMED_BARRIER.findall(compiled.asm["ptx"])) - {"0"}
    if not stack_bytes and not named:
        return 0, 1
    if not _SPILL_STORES.search(log):
        log = _ptxas_log(compiled)
    spills, barriers = _SPILL_STORES.search(log), _BARRIERS_USED.search(log)
    if spills is None or barriers is None:
        raise RuntimeError(f"`ptxas -v` reported no spill stores and barriers: {log[:500]!r}")
    return int(spills[1]), int(barriers[1])


@contextlib.contextmanager
def ptxas_logs() -> Iterator[list[str]]:
    """Give the logs of ptxas, as they come, for what is compiled meanwhile. Triton's own module is changed for it, so
    this belongs to a process that compiles one thing at a time."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    names, logs = inspect.unwrap(CUDABackend.make_cubin).__globals__, list[str]()
    names |= {"print": lambda text: logs.append(str(text)), "knobs": _WithPtxasLog(knobs)}
    try:
        yield logs
    finally:
        names["knobs"] = knobs
        del names["print"]


@contextlib.contextmanager
def only_code_that_fits(cc: tuple[int, int]) -> Iterator[None]:
    """Let a compile end before ptxas, which takes half of it, where a block would need more shared memory than it can
    ask for. Triton's own class is changed for it, so this belongs to a process that only compiles.

    Raises:
        OutOfResources: the compile within ends so.
    """
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.errors import OutOfResources

    limit, make_ptx = limits_for(cc).shared_per_block_optin_bytes, CUDABackend.make_ptx

    def make_ptx_that_fits(self: Any, module: Any, metadata: Mapping[str, Any], *rest: Any) -> Any:
        if metadata["shared"] > limit:
            raise OutOfResources(metadata["shared"], limit, "shared memory")
        return make_ptx(self, module, metadata, *rest)

    CUDABackend.make_ptx = make_ptx_that_fits
    try:
        yield
    finally:
        CUDABackend.make_ptx = make_ptx


def _ptxas_log(compiled: Any) -> str:
    """Return what `ptxas -v` says about this code, by Triton's own command line, which differs between versions.

    Triton prints the log where its settings, which are those of the whole process, say so. Other threads compile and
    print meanwhile, so its function runs with a `print` and settings of its own.
    """
    from triton import knobs
    from triton.compiler.compiler import make_backend

    # options need a power of two of warps, which a warp-specialised kernel need not have; ptxas does not get the number
    metadata = compiled.metadata._asdict() | {"num_warps": 4}
    backend = make_backend(compiled.metadata.target)
    printed: list[Any] = []
    own = inspect.unwrap(type(backend).make_cubin)
    names = own.__globals__ | {"print": printed.append, "knobs": _WithPtxasLog(knobs)}
    make_cubin = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    make_cubin(backend, compiled.asm["ptx"], {}, backend.parse_options(metadata), compiled.metadata.target.arch)
    return "\n".join(map(str, printed))


class _WithPtxasLog:
    """Triton's settings as they are, but for the one that prints the log of ptxas."""

    def __init__(self, knobs: Any) -> None:
        self._knobs = knobs

    def __getattr__(self, name: str) -> Any:
        if name == "dump_ptxas_log":
            return True
        found = getattr(self._knobs, name)
        return _WithPtxasLog(found) if name == "nvidia" else found
