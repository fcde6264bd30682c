"""The start of a program with autotuned kernels, under Triton's own tuner or ours: seconds, winners and host cost.

python -m tools.libraries.cold_start stock|blocktune

Prints one JSON object. Both run the same kernels with the same lists on the same sizes.
"""

import json
import statistics
import sys
import time
from typing import Any

import torch
import triton
from triton import language as tl

from blocktune import space
from tools import ROOT

SIZES = ((4096, 4096, 4096), (512, 4096, 4096))
ROWS = ((8192, 4096), (4096, 8192))


def kernels(autotune: Any) -> tuple[Any, Any, Any]:
    sys.path.append(str(ROOT / "examples"))
    import autotuned_matmul
    import autotuned_softmax

    few = autotuned_matmul.matmul_kernel.configs[::2]  # with three stages alone
    matmul = autotune(few, ["M", "N", "K"])(autotuned_matmul.matmul_kernel.fn)
    softmax = autotune(autotuned_softmax.softmax_kernel.configs, ["columns"])(autotuned_softmax.softmax_kernel.fn)
    return matmul, softmax, autotune(space(BLOCK=(128, 256), num_warps=(2, 4)), ["n"])(empty_kernel)


@triton.jit
def empty_kernel(x, y, z, n, stride_x, stride_y, BLOCK: tl.constexpr):
    """Does next to nothing: a launch of it costs the host's time."""
    offsets = tl.arange(0, BLOCK)
    tl.store(z + offsets, tl.load(x + offsets) + tl.load(y + offsets))


def step(matmul: Any, softmax: Any) -> None:
    """Every kernel at every size, once."""
    for m, n, k in SIZES:
        a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(k, n, device="cuda").bfloat16()
        c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        matmul[lambda meta, m=m, n=n: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)](
            a, b, c, m, n, k
        )
        torch.testing.assert_close(c, a @ b, atol=1.0, rtol=0.05)
    for rows, columns in ROWS:
        x = torch.randn(rows, columns, device="cuda")
        out = torch.empty_like(x)
        softmax[(rows,)](out, x, columns, columns)
        torch.testing.assert_close(out, torch.softmax(x, -1))
    torch.cuda.synchronize()


def host_us(kernel: Any) -> float:
    """The time on the host of a launch that is known, in microseconds: the fastest of ten medians."""
    x, y, z = (torch.zeros(256, device="cuda") for _ in range(3))
    launch = kernel[(1,)]
    medians = []
    for _ in range(10):
        times = []
        for _ in range(300):
            start = time.perf_counter()
            launch(x, y, z, 256, 1, 16)
            times.append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        medians.append(statistics.median(times))
    return min(medians)


def main(which: str) -> None:
    started = time.perf_counter()
    torch.zeros(1, device="cuda").sum().item()
    context = time.perf_counter() - started
    if which == "stock":
        from triton import autotune
    else:
        from blocktune import autotune
    made = kernels(autotune)
    started = time.perf_counter()
    step(*made[:2])
    seconds = time.perf_counter() - started
    bare = made[2].fn[(1,)]
    x = torch.zeros(256, device="cuda")
    bare(x, x, x, 256, 1, 16, BLOCK=128)
    winners = {str(key): str(config) for kernel in made[:2] for key, config in kernel.cache.items()}
    print(
        json.dumps(
            {
                "which": which,
                "context_s": round(context, 2),
                "step_s": round(seconds, 2),
                "host_us": round(host_us(made[2]), 2),
                "winners": winners,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
