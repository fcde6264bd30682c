"""A worker on the GPU, with the real kernels and some planted ones that fail there as only GPU code can."""

from typing import Any

import triton
import triton.language as tl

from blocktune.kernels.base.kernel import AttentionKernel, Launch
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.measure.bench import ShapeBench
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.worker import attention_commands, serve
from tests.support.fakes.fake_kernels import FakeKernel


@triton.jit
def store_far_away(out):
    tl.store(out + (1 << 45), 1.0)


@triton.jit
def loop_for_ever(out):
    value = tl.load(out, volatile=True)
    while value != 12345.0:
        value = tl.load(out, volatile=True)
    tl.store(out + 1, value)


@triton.jit
def store_sevens(out, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, 7.0, mask=offsets < size)


class IllegalAccess(FakeKernel):
    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        return lambda q, k, v, out, lse, scale: store_far_away[(1,)](out)


class EndlessLoop(FakeKernel):
    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        return lambda q, k, v, out, lse, scale: loop_for_ever[(1,)](out)


class WrongResult(FakeKernel):
    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
            store_sevens[(triton.cdiv(out.numel(), 1024),)](out, out.numel(), 1024)

        return launch


PLANTED: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (IllegalAccess("illegal_access"), EndlessLoop("endless_loop"), WrongResult("wrong_result"))
}


def make_bench(shape: AttentionShape, terms: Terms) -> ShapeBench:
    return ShapeBench(shape, device="cuda", clock=CudaClock(), kernels=(KERNELS | PLANTED).__getitem__, terms=terms)


if __name__ == "__main__":
    serve(attention_commands(make_bench))
