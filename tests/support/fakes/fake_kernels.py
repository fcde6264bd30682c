"""Kernels that run on the CPU: one that computes attention, and some that fail in every way that a kernel can.

The fake worker imports this module in its own process; harm is done only there.
"""

import ctypes
import errno
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, Launch
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal

SHAPE = AttentionShape(
    batch=1, num_heads=4, num_heads_kv=2, seqlen_q=80, seqlen_k=96, head_dim=16, head_dim_v=16, dtype="float32"
)


def attention(q: Any, k: Any, v: Any, out: Any, lse: Any | None, scale: float, causal: Causal = Causal.NONE) -> None:
    """Writes attention and its log-sum-exp, in the plainest way."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = q.double() @ keys.mT * scale
    if causal is not Causal.NONE:
        offset = k.shape[2] - q.shape[2] if causal is Causal.LOWER_RIGHT else 0
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        scores = scores.masked_fill(rows + offset < columns, float("-inf"))
    out.copy_(torch.softmax(scores, -1).nan_to_num() @ values)
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, -1))


class FakeKernel(AttentionKernel):
    """Computes attention; `harm(launches, out, lse)` is called after every launch with the number of launches."""

    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (32, 64, 128, 256),
        "block_n": (32, 64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    }

    def __init__(self, name: str):
        self.name = name  # type: ignore[misc]

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        del limits
        return None if shape.head_dim <= 256 else f"{self.name} takes head dimensions up to 256"

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        del shape, limits
        if config.block_m * config.block_n <= 128 * 256:
            return ()
        return (f"`block_m * block_n <= 32768` must hold, but got {config.label}. Take smaller blocks.",)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        del limits
        return (config.block_m + 2 * config.num_stages * config.block_n) * shape.head_dim * shape.element_bytes

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        del shape, limits
        return KernelConfig(self.name, 64, 64, 4, 2)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        raise NotImplementedError("the tests compile by a fake compiler")

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        del config
        launches = 0

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
            nonlocal launches
            launches += 1
            attention(q, k, v, out, lse, scale, shape.causal)
            self.harm(launches, out, lse)

        return launch

    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        """An honest kernel does none."""

    @property
    def source_hash(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]


class Segfault(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        ctypes.string_at(8)


class Abort(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        os.abort()


class Exit(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        os._exit(0)


class Hang(FakeKernel):
    """Hangs once it has been compiled and launched, as a kernel that loops for ever."""

    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        if launches > 1:
            time.sleep(1000)


class Nan(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        out[0, 0, 3, 3] = float("nan")


class Untouched(FakeKernel):
    """Writes nothing from the second launch on: what an earlier launch left must not pass for its result."""

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        honest, launches = super().bind(config, shape), 0

        def launch(*arguments: Any) -> None:
            nonlocal launches
            launches += 1
            if launches == 1:
                honest(*arguments)

        return launch


class WrongSecond(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        if launches == 2:
            out[0, -1, -1] += 0.1


class WrongLate(FakeKernel):
    """Is right until it is timed, and wrong while nobody looks."""

    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        if launches > 3:
            out[0, 0, :40] *= 1.01


class WrongLse(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        if lse is not None:
            lse += 0.5


class Slow(FakeKernel):
    """Takes so long that its rounds take more than a second."""

    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        time.sleep(0.22)


class SlowToCompile(FakeKernel):
    """Waits for a process of its own for ever, as Triton waits for a ptxas that hangs."""

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        subprocess.run(["sleep", "1000"], check=True)
        return super().bind(config, shape)


class Raises(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        raise RuntimeError("no such instruction")


class FullDisk(FakeKernel):
    """Its launch finds no space for what it writes."""

    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Killed(FakeKernel):
    """Ends as a process does from which the machine takes its memory."""

    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Chatty(FakeKernel):
    """Prints to the standard output, also below Python."""

    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        print('{"result": {}}', flush=True)
        os.write(1, b"noise\n")


class Oversized(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        raise torch.OutOfMemoryError("no room for the workspace")


class OutOfResources(Exception):
    """Named as Triton's."""


class TooLarge(FakeKernel):
    def harm(self, launches: int, out: Any, lse: Any | None) -> None:
        raise OutOfResources("shared memory")


KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        FakeKernel("honest"),
        FakeKernel("rival"),
        Segfault("segfault"),
        Abort("abort"),
        Exit("exit"),
        Hang("hang"),
        Nan("nan"),
        Untouched("untouched"),
        WrongSecond("wrong_second"),
        WrongLate("wrong_late"),
        WrongLse("wrong_lse"),
        Slow("slow"),
        SlowToCompile("slow_to_compile"),
        Raises("raises"),
        FullDisk("full_disk"),
        Killed("killed"),
        Chatty("chatty"),
        Oversized("oversized"),
        TooLarge("too_large"),
    )
}
