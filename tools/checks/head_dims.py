"""Checks and times every head dimension that is a multiple of 8, in turns with cuDNN and FlashAttention-2, on a GPU.

PYTHONPATH=. python -P -m tools.checks.head_dims --out head_dims.json [--directions decode] [--dims 40,72]

Rows are `decode` (batch 16, 16 heads, one query, 8192 keys), `forward` and `backward` (batch 2, 16 heads, 4096 tokens,
full and causal). Processes of their own compile ahead, by running the very calls. Each result is compared with the
definition in float32, next to how far PyTorch's back ends are off. A time is the median of the rounds, in which the
contenders follow each other in a random order, each behind a launch that overwrites the L2 cache; the host is ahead of
the device. `ours` is a call out of the box; of decoding and forwards, configs are the kernels' defaults, with
--variants other tiles as well. A peer that does not compute a shape is left out. The file is written after every row;
--seconds bounds the whole run.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton  # noqa: F401  before the processes are forked
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune import attention
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction

DIMS = tuple(range(8, 257, 8))
FIRST = (72, 40, 88, 104, 120, 56, 80, 96, 112, 64, 128, 136)
"""What is timed before all other dimensions."""
DIRECTIONS = ("decode", "forward", "backward")
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
TILES = {
    "flash_decode_hopper": (
        (128, 8, 1, 1), (256, 8, 1, 1), (128, 4, 1, 1), (128, 4, 1, 2), (64, 4, 1, 2), (256, 8, 1, 2),
    ),
    "flash_decode": (
        (128, 4, 2, 1), (64, 4, 4, 1), (64, 4, 3, 2), (64, 4, 2, 2), (64, 4, 2, 4), (32, 4, 4, 2), (64, 8, 3, 1),
        (64, 8, 4, 1), (128, 8, 2, 1), (128, 8, 3, 1), (128, 4, 3, 2),
    ),
}  # fmt: skip
"""block_n, num_warps, num_stages and splits of what is timed next to the defaults of decoding, where asked for."""
FORWARD = "flash_fwd_hopper"
FORWARD_TILES = tuple(
    (block_m, block_n, stages, early_p)
    for block_m, block_n, stages in (
        (128, 64, 4), (128, 64, 3), (192, 64, 4), (192, 64, 3), (192, 128, 3), (192, 128, 2), (256, 64, 4),
    )
    for early_p in (0, 1)
)  # fmt: skip
"""block_m, block_n, num_stages and early_p of forward tiles."""
ROUNDS = 15
FLUSH_BYTES = 160 << 20
HEAD_START_CYCLES = 4_000_000
WORKERS = 12

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A direction of attention with heads of this dimension."""

    direction: str
    head_dim: int
    causal: bool

    @property
    def label(self) -> str:
        return f"{self.direction} d{self.head_dim} {'causal' if self.causal else 'full'}"

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            direction=Direction.BACKWARD if self.direction == "backward" else Direction.FORWARD,
            dtype="bfloat16",
            batch=16 if self.direction == "decode" else 2,
            num_heads=16,
            num_heads_kv=16,
            seqlen_q=1 if self.direction == "decode" else 4096,
            seqlen_k=8192 if self.direction == "decode" else 4096,
            head_dim=self.head_dim,
            causal=Causal.UPPER_LEFT if self.causal else Causal.NONE,
        )

    def tensors(self) -> Tensors:
        """Return query, key, value, and the gradient of the output."""
        shape = self.shape
        torch.manual_seed(self.head_dim)
        return tuple(
            torch.randn(shape.batch, shape.num_heads, rows, shape.head_dim, device="cuda", dtype=torch.bfloat16)
            for rows in (shape.seqlen_q, shape.seqlen_k, shape.seqlen_k, shape.seqlen_q)
        )


def rows_of(directions: Sequence[str], dims: Sequence[int]) -> Iterator[Row]:
    """Yield the rows, directions outside, those of FIRST first."""
    ordered = sorted(dims, key=lambda dim: FIRST.index(dim) if dim in FIRST else len(FIRST))
    for direction in directions:
        for dim in ordered:
            yield from (
                Row(direction, dim, causal) for causal in ((False,) if direction == "decode" else (False, True))
            )


def run_of(attend: Callable[..., torch.Tensor], row: Row, tensors: Tensors) -> Run:
    """Return a call that computes a row's results: the output, or the three gradients."""
    *inputs, dout = tensors
    if row.direction != "backward":
        return lambda: (attend(*inputs, is_causal=row.causal),)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attend(*leaves, is_causal=row.causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def of_backend(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, is_causal=is_causal)

    return attend


def configs_of(name: str, row: Row, variants: bool) -> Iterator[KernelConfig]:
    """Yield the default of one of our kernels, and other tiles; nothing where it does not compute the row."""
    kernel, limits = get_kernel(name), limits_for(torch.cuda.get_device_capability())
    if kernel.unsupported(row.shape, limits):
        return
    default = kernel.default_config(row.shape, limits)
    yield default
    if name == FORWARD:
        yield from forward_tiles(row) if variants else ()
        return
    for block_n, warps, stages, splits in TILES[name] if variants else ():
        own = default.parameters | {"block_n": block_n, "num_warps": warps, "num_stages": stages, "splits": splits}
        own |= {"overlap": int(splits > 1)} if "overlap" in own else {}
        config = KernelConfig.of(name, own)
        if config != default and kernel.surely_fits(config, row.shape, limits):
            yield config


def forward_tiles(row: Row) -> Iterator[KernelConfig]:
    """Yield other tiles of the Hopper forward; queries are in no registers, and K and V share slots."""
    kernel, limits = get_kernel(FORWARD), limits_for((9, 0))
    for block_m, block_n, stages, early_p in FORWARD_TILES:
        own = dict.fromkeys(kernel.parameters, 0) | {"block_m": block_m, "block_n": block_n, "num_warps": 4}
        config = KernelConfig.of(FORWARD, own | {"num_stages": stages, "early_p": early_p})
        if kernel.surely_fits(config, row.shape, limits):
            yield config


def of_config(config: KernelConfig, row: Row, tensors: Tensors) -> Run:
    """Return the launch of a config."""
    (q, k, v, _), scale = tensors, row.head_dim**-0.5
    out = torch.empty_like(q)
    launch = get_kernel(config.kernel).bind(config, row.shape).pinned(q, k, v, out, None, scale)  # type: ignore[attr-defined]

    def run() -> Tensors:
        launch(q, k, v, out, None, scale)
        return (out,)

    return run


def own_runs(row: Row, tensors: Tensors, variants: bool) -> dict[str, Run]:
    found = {"ours": run_of(attention, row, tensors)}
    if row.direction != "backward":
        names = TILES if row.direction == "decode" else (FORWARD,)
        configs = (config for name in names for config in configs_of(name, row, variants))
        found |= {config.label: of_config(config, row, tensors) for config in configs}
    return found


def peer_runs(row: Row, tensors: Tensors) -> dict[str, Run]:
    """Return the peers that compute the row."""
    found: dict[str, Run] = {}
    for name, backend in PEERS.items():
        try:
            run = run_of(of_backend(backend), row, tensors)
            run()
        except RuntimeError as error:
            print(f"{name}: {row.label}: {str(error).splitlines()[0]}", flush=True)
        else:
            found[name] = run
    return found


def compile_ahead(variants: bool, row: Row) -> str | None:
    """Run our contenders once, in a process of its own; return what went wrong, or None."""
    try:
        for run in own_runs(row, row.tensors(), variants).values():
            run()
        torch.cuda.synchronize()
    except Exception as error:  # the parent reports it and goes on
        return f"{row.label}: {type(error).__name__}: {error}"
    finally:
        torch.cuda.empty_cache()
    return None


def definition(row: Row, tensors: Tensors) -> Tensors:
    """Return the results in float32, head by head of the batch entries."""
    parts: list[Tensors] = []
    for entry in zip(*(tensor.float().split(1) for tensor in tensors), strict=True):
        parts.append(tuple(part.detach() for part in run_of(of_backend(SDPBackend.MATH), row, entry)()))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def error_of(results: Sequence[torch.Tensor], right: Tensors) -> float:
    """Return the largest relative error of a tensor by the Frobenius norm; NaN counts as infinite."""
    worst = 0.0
    for found, wanted in zip(results, right, strict=True):
        error = float((found.float() - wanted).norm() / wanted.norm())
        worst = max(worst, error if error == error else float("inf"))
    return worst


def times_of(runs: Mapping[str, Run], flush: torch.Tensor) -> dict[str, float]:
    """Return the median of each contender, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        marks = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in runs}
        torch.cuda._sleep(HEAD_START_CYCLES)
        for name in random.sample(list(runs), len(runs)):
            flush.zero_()
            marks[name][0].record()
            runs[name]()
            marks[name][1].record()
        torch.cuda.synchronize()
        for name, (begin, end) in marks.items():
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def measure_row(row: Row, flush: torch.Tensor, variants: bool) -> dict[str, Any]:
    """Return a row's times, errors and ratios."""
    tensors = row.tensors()
    runs = own_runs(row, tensors, variants) | peer_runs(row, tensors)
    right = definition(row, tensors)
    errors = {name: error_of(run(), right) for name, run in runs.items()}
    bound = 2 * max((errors[name] for name in PEERS if name in errors), default=8e-3) + 1e-3
    times = times_of(runs, flush)
    config = attention.explain(row.shape).config
    return {
        "row": row.label,
        "config": config and config.label,
        "time_us": times,
        "ratio": {name: round(times[name] / times["ours"], 3) for name in times if name != "ours"},
        "error": {name: float(f"{error:.2e}") for name, error in errors.items()},
        "right": all(error <= bound for name, error in errors.items() if name not in PEERS),
    }


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--directions", type=lambda text: text.split(","), default=list(DIRECTIONS))
    parser.add_argument("--dims", type=numbers, default=DIMS)
    parser.add_argument("--variants", action="store_true", help="time other tiles of decoding, too")
    parser.add_argument("--seconds", type=float, default=285)
    asked = parser.parse_args()
    begin = time.monotonic()
    rows = list(rows_of(asked.directions, asked.dims))
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        problems = [problem for problem in pool.map(partial(compile_ahead, asked.variants), rows) if problem]
    print(*problems, f"compiled ahead in {time.monotonic() - begin:.0f} s", sep="\n", flush=True)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    found: list[dict[str, Any]] = []
    for row in rows:
        if time.monotonic() - begin > asked.seconds:
            print(f"out of time before {row.label}", flush=True)
            break
        try:
            found.append(measure_row(row, flush, asked.variants))
        except Exception as error:  # one row that fails is no reason to lose the others
            found.append({"row": row.label, "right": False, "failed": f"{type(error).__name__}: {error}"})
        print(json.dumps(found[-1]), flush=True)
        document = {"device": torch.cuda.get_device_name(), "problems": problems, "rows": found}
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
        torch.cuda.empty_cache()
    wrong = [row["row"] for row in found if not row["right"]]
    print(f"{len(found)} rows in {time.monotonic() - begin:.0f} s; wrong: {wrong or 'none'}", flush=True)
    return 1 if wrong or problems else 0


if __name__ == "__main__":
    sys.exit(main())
