"""Kernels for the tests of the compile farm: one that compiles, and some that harm the process that compiles them.

Workers import this module by name; harm is done only there, never in the test's own process.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

SHAPE = AttentionShape(
    batch=1, num_heads=1, num_heads_kv=1, seqlen_q=64, seqlen_k=64, head_dim=64, head_dim_v=64, dtype="float16"
)


@triton.jit
def product_kernel(A, B, C, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr):
    """C[m, :] = sum over tiles of exp2(A B^T): one matrix product in a loop, as in attention."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    columns = tl.arange(0, BLOCK_N)
    a = tl.load(A + rows[:, None] * DIM + dims[None, :])
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n, BLOCK_N):
        b = tl.load(B + (start + columns)[:, None] * DIM + dims[None, :])
        total += tl.exp2(tl.dot(a, tl.trans(b)))
    tl.store(C + rows[:, None] * BLOCK_N + columns[None, :], total)


@triton.jit
def broken_kernel(A, BLOCK_M: tl.constexpr):
    tl.static_assert(BLOCK_M > 1024, "BLOCK_M is too small")
    tl.store(A + tl.arange(0, BLOCK_M), 0.0)


def config(kernel: str, block_m: int = 64, num_warps: int = 4) -> KernelConfig:
    """A config whose code differs from that of every other kernel here, by its number of stages."""
    return KernelConfig(kernel, block_m, 64, num_warps, 2 + list(KERNELS).index(kernel))


class OneFunction:
    """A config launches a single function."""

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        del config, shape
        return ()


class ProductKernel(OneFunction):
    """The part of AttentionKernel that compiling needs."""

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        arguments = {
            "A": TensorArgument("float16"),
            "B": TensorArgument("float16"),
            "C": TensorArgument("float32"),
            "n": shape.seqlen_k,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "DIM": shape.head_dim,
        }
        return specialize(product_kernel, arguments, _options(config))


class BrokenKernel(OneFunction):
    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        del shape
        arguments = {"A": TensorArgument("float32"), "BLOCK_M": config.block_m}
        return specialize(broken_kernel, arguments, _options(config))


def _options(config: KernelConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


class HarmfulKernel(ProductKernel):
    """Compiles in the test's process and in that which it has started; harms the workers that this one forks."""

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        if int(os.environ["BLOCKTUNE_TEST_PID"]) not in (os.getpid(), os.getppid()):
            self.harm()
        return super().compile_spec(config, shape)

    def harm(self) -> None:
        raise NotImplementedError


class AbortingKernel(HarmfulKernel):
    def harm(self) -> None:
        print("Assertion `layout' failed.", file=sys.stderr, flush=True)
        os.abort()


class KilledKernel(HarmfulKernel):
    def harm(self) -> None:
        os.kill(os.getpid(), 9)


class SleepingKernel(HarmfulKernel):
    """Waits for a child process for ever, as Triton waits for a ptxas that hangs."""

    def harm(self) -> None:
        with subprocess.Popen(["sleep", "1000"]) as child:
            Path(os.environ["BLOCKTUNE_TEST_PIDS"]).write_text(f"{os.getpid()} {child.pid}")


class RejectedKernel(HarmfulKernel):
    """MLIR rejects it: it prints why, which its exception does not say."""

    def harm(self) -> None:
        print("/kernels/warps.py:136:11: error: sizes differ\n    out = reinterpret()", file=sys.stderr, flush=True)
        raise RuntimeError("error encountered during parsing")


class ChattyKernel(ProductKernel):
    """Prints to the standard output, as Triton does when ptxas fails."""

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        print("{'not': 'an answer'}", flush=True)
        os.write(1, b"nor this\n")
        return super().compile_spec(config, shape)


KERNELS: dict[str, Any] = {
    "product": ProductKernel(),
    "broken": BrokenKernel(),
    "aborting": AbortingKernel(),
    "killed": KilledKernel(),
    "sleeping": SleepingKernel(),
    "chatty": ChattyKernel(),
    "rejected": RejectedKernel(),
}


def get_kernel(name: str) -> Any:
    return KERNELS[name]
