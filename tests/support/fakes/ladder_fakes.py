"""What a ladder is climbed with where there is no GPU: a compiler, a clock, and kernels of PyTorch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from blocktune.db.records.records import Outcome
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses

H200 = device_named("h200")
SMALL = AttentionShape(
    batch=1, num_heads=2, num_heads_kv=1, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64, dtype="float16"
)


class Compiler:
    """Gives every config the shared memory that its kernel predicts; what is named in `failing` does not compile."""

    def __init__(self, *failing: str, tensor_cores: str = "wgmma") -> None:
        self.failing = failing
        self.tensor_cores = tensor_cores

    def submit(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[CompileResult]":
        future: Future[CompileResult] = Future()
        if kernel in self.failing:
            result = CompileResult(config=config, outcome=Outcome.COMPILE_ERROR, error="Traceback\nno such layout")
        else:
            warps = get_kernel(kernel).total_warps(config)
            resources = KernelResources(
                registers=1920 // max(16, warps),
                shared_bytes=get_kernel(kernel).shared_bytes(config, shape, H200.limits),
                num_warps=warps,
                tensor_cores=self.tensor_cores,
            )
            shared = SharedAccesses(loads=16, load_wavefronts=16) if self.tensor_cores == "none" else None
            result = CompileResult(config=config, outcome=Outcome.OK, resources=resources, shared=shared)
        future.set_result(result)
        return future


class FakeClock:
    """Runs every launch; the n-th of the line-up takes 100 / n us."""

    def heat(self, launch: Callable[[], None], seconds: float) -> None:
        launch()

    def rounds(self, launches: Sequence[Callable[[], None]], count: int) -> tuple[tuple[float, ...], ...]:
        if not hasattr(self, "place"):
            self.place = {id(launch): 100.0 / (number + 1) for number, launch in enumerate(launches)}
        for launch in launches:
            launch()
        return tuple(tuple(self.place[id(launch)] for launch in launches) for _ in range(count))

    def synchronize(self) -> None:
        pass


def bind(config: KernelConfig, shape: AttentionShape) -> Launch:
    """Return a launcher that computes attention on the CPU; padded heads come out wrong."""
    if shape.direction is Direction.BACKWARD:
        return _gradients_of(shape)

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
        found, found_lse = attention_reference(q, k, v, causal=shape.causal, scale=scale)
        out.copy_(found * (2 if config.kernel == "flash_fwd_padded" else 1))
        if lse is not None:
            lse.copy_(found_lse)

    return launch


def _gradients_of(shape: AttentionShape) -> Launch:
    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float) -> None:
        leaves = [tensor.detach().float().requires_grad_() for tensor in (q, k, v)]
        found, _ = attention_reference(*leaves, causal=shape.causal, scale=scale)
        for result, gradient in zip((dq, dk, dv), torch.autograd.grad(found, leaves, dout.float()), strict=True):
            result.copy_(gradient)

    return launch
