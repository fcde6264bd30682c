"""Launches backwards in a fixed order a thousand times under load, and says which gradients changed.

python -m tools.checks.fixed_order --out results/h200.fixed-order.table.json

A form is the default of its shape, and is right next to the float32 reference before it counts. Meanwhile products and
copies of another stream come and go on the same multiprocessors, so that blocks of keys start and end in other orders
than alone. The file is written after every form.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from blocktune.db.exchange.document import save_text
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.correctness.backward import GRADIENTS
from blocktune.tuner.correctness.checks_of_shape import questions_of
from tests.support.ranks.document import new_document, table
from tools.bench.defaults import compile_ahead, default_of

BASE = AttentionShape(
    batch=4,
    num_heads=8,
    num_heads_kv=8,
    seqlen_q=2048,
    seqlen_k=2048,
    head_dim=128,
    head_dim_v=128,
    direction=Direction.BACKWARD,
    features=Features.parse("deterministic"),
)
COLUMNS = ("shape, bf16", "kernel", "launches", "gradients that were not equal to the bit")
HOW = (
    "each form launched again and again with the same tensors while another stream multiplied and copied matrices, "
    "every gradient compared with the first launch's, which is right next to float32."
)
LOAD_SIZES = (1024, 2048, 3072)


def form(head_dim: int, causal: bool, features: str = "", head_dim_v: int = 0, **sizes: int) -> AttentionShape:
    """Return a backward in a fixed order."""
    return replace(
        BASE,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        causal=Causal.LOWER_RIGHT if causal else Causal.NONE,
        features=Features.parse(f"deterministic {features}"),
        **sizes,
    )


FORMS = (
    *(form(head_dim, causal) for head_dim in (64, 96, 128, 192, 256) for causal in (True, False)),
    form(192, True, head_dim_v=128),
    form(128, True, num_heads_kv=2),
    form(64, False, num_heads_kv=1),
    form(128, True, "window=511:-1"),
    form(64, True, "softcap"),
    form(128, False, seqlen_q=1900, seqlen_k=2000),
    form(128, True, "varlen"),
    form(128, True, "alibi"),
    form(128, False, "boolean"),
    form(64, True, "dropout"),
    form(128, False, "block_sparse"),
    form(64, True, "block_sparse"),
)


class Load:
    """Work of another stream, of lengths that differ from step to step."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._matrices = [torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for size in LOAD_SIZES]

    def step(self, number: int) -> None:
        """Enqueue a product and a copy."""
        matrix = self._matrices[number % len(self._matrices)]
        with torch.cuda.stream(self._stream):
            torch.mm(matrix, matrix)
            matrix.clone()


def count_changed(shape: AttentionShape, launches: int, load: Load) -> dict[str, int]:
    """Return how many launches gave other bits than the first, by gradient.

    Raises:
        ValueError: the first one is wrong.
    """
    config = default_of(shape)
    question, _ = questions_of(shape, device="cuda", seed=0)
    result = question.new_result()
    run = question.thunk(get_kernel(config.kernel).bind(config, shape), result)
    question.poison(result)
    run()
    if problem := question.problem(result):
        raise ValueError(f"{shape.label}: {problem}")
    first = [gradient.clone() for gradient in result]
    counts = torch.zeros(len(GRADIENTS), dtype=torch.int64, device="cuda")
    for number in range(launches):
        load.step(number)
        run()
        counts += torch.stack([(now != then).any() for now, then in zip(result, first, strict=True)])
    return dict(zip(GRADIENTS, counts.tolist(), strict=True))


def told(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} in {count}" for name, count in counts.items() if count) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no form is begun")
    parser.add_argument("--workers", type=int, default=12)
    asked = parser.parse_args()
    end, rows = time.monotonic() + asked.seconds, []
    compile_ahead(FORMS, asked.workers)
    document, load = new_document(torch.device("cuda")), Load()
    for shape in FORMS:
        if time.monotonic() > end:
            break
        counts = count_changed(shape, asked.launches, load)
        rows.append([shape.label, f"`{default_of(shape).kernel}`", f"{asked.launches:,}", told(counts)])
        print(*rows[-1], sep=" | ", flush=True)
        save_text(json.dumps(table(document, HOW, COLUMNS, rows), indent=1, sort_keys=True) + "\n", asked.out)


if __name__ == "__main__":
    main()
