"""Launches that reach for one ceiling each, on the GPU here: memory, L2, matrix products and exponentials."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from blocktune.kernels.base.kernel import Thunk
from blocktune.tuner.measure.clock import Clock
from blocktune.tuner.profile.ceiling_kernels import exp_kernel, read_kernel

COPIED_BYTES = 1 << 30
"""At most; a quarter of the free memory on a card with little of it."""

READ_STEPS, READ_BLOCK, READ_WARPS, READERS_PER_SM = 256, 4096, 8, 4
L2_SHARE = 4
"""The part of L2 that is read: all of it would not stay, and it has two halves that keep copies for each other."""

EXP_STEPS, EXP_BLOCK, EXP_WARPS, EXP_BLOCKS_PER_SM = 1024, 2048, 8, 8
"""Eight values a thread, which do not depend on each other, and as many threads as an SM holds."""

MATRIX_ROWS = 8192

HEAT_SECONDS, ROUNDS = 0.2, 15


@dataclass(frozen=True, slots=True)
class Probe:
    """A launch that does an amount of one thing: bytes, FLOP or exponentials."""

    amount: float
    run: Thunk

    def best_rate(self, clock: Clock) -> float:
        """Return what the fastest round reached, in 1e9 a second."""
        clock.heat(self.run, HEAT_SECONDS)
        return self.amount / min(time_us for (time_us,) in clock.rounds([self.run], ROUNDS)) / 1e3


def copy_probe() -> Probe:
    """Return a copy from memory to memory, of which both ways count."""
    free, _ = torch.cuda.mem_get_info()
    source = torch.zeros(min(COPIED_BYTES, free // 4), dtype=torch.uint8, device="cuda")
    goal = torch.empty_like(source)
    return Probe(2.0 * source.numel(), lambda: goal.copy_(source))


def l2_probe(l2_bytes: int, num_sms: int, device: str = "cuda", steps: int = READ_STEPS) -> Probe:
    """Return reads of what fits L2, by all multiprocessors."""
    num_blocks = max(1, l2_bytes // L2_SHARE // (4 * READ_BLOCK))
    words = torch.ones(num_blocks, READ_BLOCK, device=device)
    programs = READERS_PER_SM * num_sms
    sums = torch.zeros(programs, READ_BLOCK, device=device)
    return Probe(
        4.0 * programs * steps * READ_BLOCK,
        lambda: read_kernel[(programs,)](words, sums, num_blocks, STEPS=steps, BLOCK=READ_BLOCK, num_warps=READ_WARPS),
    )


def matrix_probe() -> Probe:
    """Return a product of two large matrices by PyTorch's library, of bfloat16 where tensor cores have that."""
    dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    a, b = (torch.randn(MATRIX_ROWS, MATRIX_ROWS, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return Probe(2.0 * MATRIX_ROWS**3, lambda: torch.mm(a, b, out=out))


def exp_probe(num_sms: int, device: str = "cuda", steps: int = EXP_STEPS) -> Probe:
    """Return exponentials of values in registers."""
    programs = EXP_BLOCKS_PER_SM * num_sms
    values = torch.rand(programs, EXP_BLOCK, device=device)
    return Probe(
        float(programs) * steps * EXP_BLOCK,
        lambda: exp_kernel[(programs,)](values, STEPS=steps, BLOCK=EXP_BLOCK, num_warps=EXP_WARPS),
    )


def probes_here() -> dict[str, Callable[[], Probe]]:
    """Return what makes the probe of every ceiling of the current GPU, by the ceiling's name."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    num_sms = properties.multi_processor_count
    return {
        "memory": copy_probe,
        "l2": lambda: l2_probe(properties.L2_cache_size, num_sms),
        "matrix": matrix_probe,
        "exp": lambda: exp_probe(num_sms),
    }
