"""Times the Hopper forward over parts of the keys beside the same in one piece and PyTorch's, on the current GPU.

    python -P -m tools.bench.serving.split_forward results/h200.split-forward.table.json

The shapes are chunks of prompts after a context and others with fewer tiles than the GPU has multiprocessors. Every
launch has its default config and is checked against a reference first.
"""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blocktune.db.exchange.document import save_text
from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.correctness.inputs import make_inputs
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.protocol import column
from tests.support.ranks.document import new_document, table
from tools.bench.serving.decoding import Run, Timed, check_config

SIZES = (
    (1, 32, 4, 91, 16384, 136),
    (1, 4, 2, 1814, 32768, 64),
    (1, 4, 1, 8268, 8268, 64),
    (1, 8, 1, 64, 8192, 128),
    (1, 8, 1, 256, 1024, 128),
    (1, 8, 1, 256, 32768, 128),
    (1, 8, 1, 512, 1500, 64),
    (1, 8, 1, 512, 4096, 128),
    (1, 8, 1, 512, 32768, 128),
    (1, 8, 1, 1024, 16384, 128),
    (1, 16, 4, 512, 2048, 128),
    (1, 16, 4, 512, 8192, 128),
    (1, 32, 8, 128, 8192, 128),
    (1, 32, 8, 512, 32768, 128),
    (1, 3, 3, 6000, 6000, 128),
    (1, 8, 2, 700, 20000, 192),
    (1, 8, 2, 700, 20000, 256),
    (2, 16, 4, 300, 3000, 64),
    (1, 8, 8, 2048, 8192, 64),
    (1, 4, 4, 2048, 2048, 128),
)
"""batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim"""
CAUSAL_SIZES = (
    (1, 4, 1, 2048, 2048, 128),
    (1, 8, 1, 2048, 2048, 128),
    (1, 4, 1, 4096, 4096, 128),
    (1, 8, 1, 4096, 4096, 128),
    (1, 4, 1, 8192, 8192, 128),
    (1, 8, 1, 8192, 8192, 128),
    (1, 4, 4, 4096, 4096, 64),
    (1, 8, 8, 4096, 4096, 64),
    (1, 16, 2, 2048, 2048, 64),
    (1, 2, 2, 16384, 16384, 64),
    (1, 4, 4, 3000, 3000, 96),
    (1, 4, 4, 4096, 4096, 256),
)
"""The same, from the upper left."""
WHOLE, SPLIT, DECODE = "flash_fwd_hopper", "flash_fwd_hopper_split", "flash_decode"
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
ROUNDS = 12
HEAT_SECONDS = 0.2
HOW = (
    f"medians of {ROUNDS} rounds in turns, the L2 cache overwritten before every launch; bfloat16, default "
    "configs; the ratio is of the fastest of the others."
)
COLUMNS = (
    "shape",
    "parts",
    "split, µs",
    "one piece, µs",
    "decoding, µs",
    *(f"{name}, µs" for name in BACKENDS),
    "ratio",
)


def shape_of(
    batch: int, num_heads: int, num_heads_kv: int, seqlen_q: int, seqlen_k: int, head_dim: int
) -> AttentionShape:
    return AttentionShape(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
    )


def config_of(kernel: str, shape: AttentionShape) -> KernelConfig | None:
    """Return the default of a kernel, None where it leaves the shape to others."""
    limits = current_device().limits
    if get_kernel(kernel).unsupported(shape, limits) is not None:
        return None
    return get_kernel(kernel).default_config(shape, limits)


def launches_of(shape: AttentionShape) -> dict[str, Run]:
    """Return the launches of our kernels and of PyTorch's."""
    inputs = make_inputs(shape, device="cuda", seed=2)
    given: list[Any] = [inputs.q, inputs.k, inputs.v, torch.empty_like(inputs.q), None, softmax_scale(shape)]
    found: dict[str, Run] = {}
    for kernel in (SPLIT, WHOLE, DECODE):
        if (config := config_of(kernel, shape)) is not None:
            bound: Any = get_kernel(kernel).bind(config, shape)
            found[kernel] = functools.partial(bound.pinned(*given), *given)
    is_causal = shape.causal is not Causal.NONE
    for name, backend in BACKENDS.items():
        found[name] = functools.partial(of_pytorch, backend, inputs.q, inputs.k, inputs.v, is_causal)
    return found


def of_pytorch(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def row_of(shape: AttentionShape, clock: CudaClock) -> list[str]:
    """Return the cells of a shape."""
    runs = launches_of(shape)
    clock.heat(runs[WHOLE], HEAT_SECONDS)
    rounds = clock.rounds(list(runs.values()), ROUNDS)
    times = {label: Timed(label, None, column(rounds, number)) for number, label in enumerate(runs)}
    config, split = config_of(SPLIT, shape), times.get(SPLIT)
    names = [name for name in (WHOLE, DECODE, *BACKENDS) if name in times]
    others = [f"{times[name].time_us:,.1f}" if name in times else "" for name in (WHOLE, DECODE, *BACKENDS)]
    if config is None or split is None:
        return [shape.label, "", "", *others, ""]
    fastest = min((times[name] for name in names), key=lambda one: one.time_us)
    ratio = f"{split.as_fast_as(fastest):.3f}"
    return [shape.label, str(config.parameters["splits"]), f"{split.time_us:,.1f}", *others, ratio]


def main(out: str) -> None:
    shapes = [shape_of(*sizes) for sizes in SIZES]
    shapes += [replace(shape_of(*sizes), causal=Causal.UPPER_LEFT) for sizes in CAUSAL_SIZES]
    cc, clock = current_device().limits.cc, CudaClock()
    rows: list[list[str]] = []
    with CompileFarm(workers=14) as farm:
        configs = [
            (config, shape) for shape in shapes for name in (SPLIT, WHOLE, DECODE) if (config := config_of(name, shape))
        ]
        for submitted in [farm.submit(config.kernel, config, shape, cc) for config, shape in configs]:
            submitted.result()
    for config, shape in configs:
        check_config(shape, config)
    for shape in shapes:
        rows.append(row_of(shape, clock))
        print(*rows[-1], flush=True)
    found = table(new_document(torch.device("cuda")), HOW, COLUMNS, rows)
    save_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
