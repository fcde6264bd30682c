"""A library with a public function for each way of a launch; tests run them on a GPU that launches nothing."""

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.runtime.autotuner import Autotuner

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4, num_stages=stages) for block in (128, 512) for stages in (1, 2)]


@triton.jit
def doubled(value):
    return value * 2


@triton.jit
def strided_kernel(out, x, shift, n, stride, factor, pair, DTYPE: tl.constexpr, OF: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = OF(tl.load(x + offsets * stride, offsets < n).to(DTYPE)) * factor
    if shift is not None:
        value += tl.load(shift + offsets * pair[1], offsets < n)
    tl.store(pair[0] + offsets, value, offsets < n)
    tl.store(out + offsets, value, offsets < n)


@triton.autotune(CONFIGS, key=["n"])
@triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
@triton.jit
def even_kernel(out, x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) + 1, mask)


@triton.autotune([triton.Config({"M": 128, "N": 256}, num_stages=stages) for stages in (2, 8)], key=[])
@triton.jit
def product_kernel(c, a, b, K, M: tl.constexpr, N: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, 64)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, 64):
        left = tl.load(a + rows[:, None] * K + inner[None, :] + start)
        total += tl.dot(left, tl.load(b + (inner[:, None] + start) * N + columns[None, :]))
    tl.store(c + rows[:, None] * N + columns[None, :], total)


class OwnTuner(Autotuner):
    """A tuner with a `run` of its own, as some libraries have."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        times = {config: self._bench(*args, config=config, **kwargs) for config in self.configs}
        return self.fn.run(*args, **kwargs, **min(times, key=lambda config: times[config]).all_kwargs())


own_kernel = OwnTuner(even_kernel.fn, even_kernel.arg_names, CONFIGS, ["n"], None, None)


def grid(n: int) -> Any:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def strided() -> None:
    """Launch with a size of 1, None, a function, a data type and a tuple."""
    x = torch.ones(1000, device="cuda", dtype=torch.bfloat16)
    out, pair = torch.empty_like(x), torch.empty_like(x)
    options = {"DTYPE": tl.float32, "OF": doubled, "BLOCK": 256}
    strided_kernel[grid(1000)](out, x, None, 1000, 1, 2.0, (pair, 1), **options)
    strided_kernel[grid(1000)](out, x, None, 1000, 3, 2.0, (pair, 1), **options)
    strided_kernel[grid(1000)](out, x, None, 1000, 1, 3.0, (pair, 1), **options)


def even() -> None:
    for n in (1024, 1000, 1024):
        even_kernel[grid(n)](torch.empty(n, device="cuda"), torch.ones(n, device="cuda"), n)


def tuned_by_its_own() -> None:
    own_kernel[grid(1024)](torch.empty(1024, device="cuda"), torch.ones(1024, device="cuda"), 1024)


def product() -> None:
    a, b = torch.ones(128, 512, device="cuda"), torch.ones(512, 256, device="cuda")
    product_kernel[(1,)](torch.empty(128, 256, device="cuda"), a.bfloat16(), b.bfloat16(), 512)


class Doubling(torch.autograd.Function):
    """Doubles by kernels, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _doubled(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _doubled(gradient)


def _doubled(x: Tensor) -> Tensor:
    assert x.is_cuda
    assert x.device.type == "cuda"
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    even_kernel[grid(x.numel())](out, x, x.numel())
    return out


def backward() -> None:
    x = torch.ones(1024, device="cuda", requires_grad=True)
    Doubling.apply(x).backward(torch.ones(1024, device="cuda", dtype=torch.float32))


def large() -> None:
    """Launch on more memory than there is."""
    x = torch.empty(1 << 44, device="meta")
    even_kernel[grid(x.numel())](torch.empty_like(x), x, x.numel())


def fails() -> None:
    even()
    raise RuntimeError("no\nluck")


def launches_nothing() -> None:
    torch.ones(1, device="cuda").add_(1)
