"""Seconds of the first call of a process, and of one of another length after it, on a GPU.

python -m tools.calls.first_call [--gradients] [--functions NUMBER]

Run it twice: the first process may fill Triton's cache. PyTorch's own backward runs before, which imports modules too.
"""

import argparse
import cProfile
import pstats
import time

import torch

from blocktune import attention

LENGTHS = (1024, 777)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gradients", action="store_true", help="forward and backward")
    parser.add_argument("--functions", type=int, default=0, help="how many functions to print of the first call")
    given = parser.parse_args()
    warm = torch.ones(2, device="cuda", requires_grad=True)
    torch.autograd.grad(warm * 2, warm, torch.ones_like(warm))
    for length in LENGTHS:
        sizes = (2, 16, length, 64)
        query, key, value = (
            torch.randn(sizes, dtype=torch.bfloat16, device="cuda").requires_grad_(given.gradients) for _ in range(3)
        )
        grad = torch.randn(sizes, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        profiler = cProfile.Profile()
        if given.functions and length == LENGTHS[0]:
            profiler.enable()
        began = time.perf_counter()
        out = attention(query, key, value, is_causal=True)
        if given.gradients:
            torch.autograd.grad(out, (query, key, value), grad)
        torch.cuda.synchronize()
        print(f"{length} tokens: {time.perf_counter() - began:.3f} s", flush=True)
        profiler.disable()
        if given.functions and length == LENGTHS[0]:
            pstats.Stats(profiler).strip_dirs().sort_stats("cumtime").print_stats(given.functions)


if __name__ == "__main__":
    main()
