"""Times of the Hopper kernels with ALiBi, masks and dropout, beside their plain form and who else computes them.

python -m tools.bench.biases --out results/h200.backward-biases.table.json
python -m tools.bench.biases --direction forward --out results/h200.biases.table.json

Ours are default configs, checked against the float32 reference before they are timed. All take turns in every round.
PyTorch computes ALiBi as an additive mask of its own for every head; the fastest of its back ends counts. The pairs
that it drops are others, so that its results under dropout are not checked. Shapes are compiled in `--workers`
processes ahead. The file is written after every shape, and no shape is begun after `--seconds`.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktune.db.exchange.document import save_text
from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.features import NO_FEATURES, Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.compare.peers import Compute, for_question, thunk_compute
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion, questions_of
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.protocol import column
from tests.support.ranks.document import new_document, table

KERNELS = {
    Direction.FORWARD: ("flash_fwd_hopper", "flash_fwd_general"),
    Direction.BACKWARD: ("flash_bwd_hopper", "flash_bwd_fused"),
}
"""Ours, and the portable one."""
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
SHAPES = (
    (4, 16, 4096, 128, True, "alibi"),
    (4, 32, 4096, 64, True, "alibi"),
    (4, 16, 4096, 128, False, "alibi"),
    (4, 32, 4096, 64, False, "alibi"),
    (8, 16, 2048, 128, False, "boolean"),
    (8, 32, 2048, 64, False, "boolean"),
    (8, 16, 2048, 128, False, "additive"),
    (8, 32, 2048, 64, False, "additive"),
    (4, 16, 4096, 128, True, "dropout"),
    (4, 32, 4096, 64, True, "dropout"),
    (4, 16, 4096, 128, True, "boolean"),
    (1, 16, 8192, 128, True, "additive"),
)
"""batch, heads, length, head_dim, causal, features."""
WIDE = {
    Direction.FORWARD: (4, 8, 4096, 256, True, "dropout"),
    Direction.BACKWARD: (4, 8, 4096, 256, False, "boolean"),
}
ROUNDS = 12
HEAT_SECONDS = 0.3
HOW = (
    f"medians of {ROUNDS} rounds in turns, the L2 cache overwritten before every launch, the host ahead; ours "
    "are the default configs, and a mask is laid out within the time. PyTorch's is its fastest back end, which has "
    "ALiBi as an additive mask."
)


def columns(direction: Direction) -> tuple[str, ...]:
    times = "ours, µs", "ours without the feature, µs", f"`{KERNELS[direction][1]}`, µs", "PyTorch, µs"
    return f"shape, bf16, {direction}", *times, "TFLOP/s", "of the plain rate", "over PyTorch"


def shape_of(
    direction: Direction, batch: int, heads: int, length: int, dim: int, causal: bool, features: str
) -> AttentionShape:
    return AttentionShape(
        batch=batch,
        num_heads=heads,
        num_heads_kv=heads,
        seqlen_q=length,
        seqlen_k=length,
        head_dim=dim,
        head_dim_v=dim,
        causal=Causal.UPPER_LEFT if causal else Causal.NONE,
        direction=direction,
        features=Features.parse(features),
    )


def plain(shape: AttentionShape) -> AttentionShape:
    return replace(shape, features=NO_FEATURES)


def compile_ahead(shapes: list[AttentionShape], device: DeviceSpec, workers: int) -> None:
    """Compile all of ours side by side, into Triton's cache."""
    wanted = []
    for shape in shapes:
        ours, portable = KERNELS[shape.direction]
        wanted += [(ours, shape), (ours, plain(shape)), (portable, shape)]
    with CompileFarm(workers=workers) as farm:
        limits = device.limits
        configs = [(name, get_kernel(name).default_config(shape, limits), shape) for name, shape in wanted]
        for submitted in [farm.submit(name, config, shape, limits.cc) for name, config, shape in configs]:
            submitted.result()


def own(name: str, question: AnyQuestion, shape: AttentionShape, device: DeviceSpec) -> Compute:
    kernel = get_kernel(name)
    return thunk_compute(
        kernel.bind(kernel.default_config(shape, device.limits), shape), question, question.new_result()
    )


def check_launch(compute: Compute, question: Any) -> Thunk:
    """Return the launch of what is right.

    Raises:
        ValueError: they are not.
    """
    if problem := question.problem(compute(question.q, question.k, question.v)):
        raise ValueError(problem)
    return partial(compute, question.q, question.k, question.v)


# ---- PyTorch


def torch_mask(shape: AttentionShape, extras: Any) -> Any:
    """Return the mask that says what the shape's does, its causal mask in it; None where there is none but that."""
    mask, seen = extras.mask, None
    if shape.causal is not Causal.NONE:
        seen = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool, device="cuda").tril()
    if shape.features.alibi:
        places = torch.arange(shape.seqlen_q, device="cuda")
        distance = (places[:, None] - places).abs()
        mask = (-extras.alibi_slopes.view(-1, shape.num_heads, 1, 1) * distance).to(getattr(torch, shape.dtype))
    if mask is None or seen is None:
        return mask
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, float("-inf"))


def torch_compute(shape: AttentionShape, question: Any, backend: str) -> Compute:
    """Return scaled_dot_product_attention, or its backward, held to one back end."""
    mask, dropped = torch_mask(shape, question.inputs.extras), question.inputs.extras.dropout_p
    causal = mask is None and shape.causal is not Causal.NONE

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, dropped, is_causal=causal, scale=softmax_scale(shape)
            )

    return for_question(attend, question)


def torch_launches(shape: AttentionShape, question: Any) -> Iterator[tuple[str, Thunk]]:
    """Give PyTorch's back ends that compute the shape; what they drop is not checked."""
    for backend in BACKENDS:
        try:
            compute = torch_compute(shape, question, backend)
            if shape.features.dropout:
                compute(question.q, question.k, question.v)
                yield backend, partial(compute, question.q, question.k, question.v)
            else:
                yield backend, check_launch(compute, question)
        except (RuntimeError, ValueError) as error:
            print(f"{shape.label}: {backend}: {str(error).splitlines()[0]}", flush=True)


# ---- times


def times_of(shape: AttentionShape, device: DeviceSpec, clock: CudaClock) -> dict[str, float]:
    """Return the medians of one shape in microseconds, by who computes it."""
    question, _ = questions_of(shape, device="cuda", seed=0)
    without, _ = questions_of(plain(shape), device="cuda", seed=0)
    ours, portable = KERNELS[shape.direction]
    launches = {
        "ours": check_launch(own(ours, question, shape, device), question),
        "plain": check_launch(own(ours, without, plain(shape), device), without),
        "portable": check_launch(own(portable, question, shape, device), question),
        **dict(torch_launches(shape, question)),
    }
    clock.heat(launches["ours"], HEAT_SECONDS)
    rounds = clock.rounds(list(launches.values()), ROUNDS)
    return {name: median(column(rounds, place)) for place, name in enumerate(launches)}


def cells(label: str, shape: AttentionShape, times: dict[str, float]) -> list[str]:
    """Return a row of the table."""
    ours, peers = times["ours"], [times[name] for name in BACKENDS if name in times]
    own_us = [f"{times[name]:,.1f}" for name in ("ours", "plain", "portable")]
    peer_us, over = (f"{min(peers):,.1f}", f"{min(peers) / ours:.2f}") if peers else ("-", "-")
    return [label, *own_us, peer_us, f"{shape.flops / ours / 1e6:.0f}", f"{times['plain'] / ours:.3f}", over]


def label_of(batch: int, heads: int, length: int, dim: int, causal: bool, features: str) -> str:
    return f"b{batch} h{heads} s{length} d{dim} {'causal ' if causal else ''}{features}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--direction", type=Direction, choices=list(Direction), default=Direction.BACKWARD)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    end, device, rows = time.monotonic() + options.seconds, current_device(), []
    cases = [(sizes, shape_of(options.direction, *sizes)) for sizes in (*SHAPES, WIDE[options.direction])]
    compile_ahead([shape for _, shape in cases], device, options.workers)
    clock, document = CudaClock(), new_document(torch.device("cuda"))
    document["environment"] |= {"cudnn": str(torch.backends.cudnn.version())}
    for sizes, shape in cases:
        if time.monotonic() > end:
            break
        rows.append(cells(label_of(*sizes), shape, times_of(shape, device, clock)))
        print(*rows[-1], sep=" | ", flush=True)
        written = table(document, HOW, columns(options.direction), rows)
        save_text(json.dumps(written, indent=1, sort_keys=True) + "\n", options.out)


if __name__ == "__main__":
    main()
