"""Compares the shared memory that kernels predict with what the compiler allocates, in random cases.

PYTHONPATH=. python -P -m tools.checks.shared_draw --cases 3000 --first 0 --seconds 3600 --out shared_draw.jsonl

A case is a kernel, a config of it, a shape that it computes and an architecture; its number is its seed. Nothing is
drawn by whether it fits, so that a rule which drops a config that fits is found. Every case compiles in a process of
its own, up to the allocation. Cases in the file are not made again, and a run ends with a summary of the file.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.attention.width_classes import Case
from tools.checks.allocation import allocated_by

ARCHITECTURES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
HEAD_DIMS = tuple(range(16, 257, 8))
USUAL_HEAD_DIMS = (40, 64, 72, 80, 96, 128, 192, 256)
MOST_ABOVE_BYTES = 1024
"""By how much a bound may exceed what is allocated."""
TIMEOUT_S = 120.0


class DrawnCase(Case):
    """A case that breaks no rule but may not fit."""

    __slots__ = ()

    @property
    def specs(self) -> tuple[CompileSpec, ...]:
        """All that the config launches."""
        return (self.kernel.compile_spec(self.config, self.shape), *self.kernel.further_specs(self.config, self.shape))

    @property
    def bounds_bytes(self) -> tuple[int, int]:
        """The least and the most shared memory of a block by the kernel."""
        limits = limits_for(self.cc)
        least = self.kernel.shared_bytes(self.config, self.shape, limits)
        return least, self.kernel.most_shared_bytes(self.config, self.shape, limits)

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "DrawnCase":
        """Return the case of a line of the file."""
        return cls(KernelConfig.from_json(row["config"]), AttentionShape.from_json(row["shape"]), tuple(row["cc"]))

    @classmethod
    def draw(cls, number: int) -> "DrawnCase":
        """Return the case of a number."""
        dice = random.Random(f"shared {number}")
        while True:
            kernel, cc = dice.choice(list(KERNELS.values())), dice.choice(ARCHITECTURES)
            shape = _shape(kernel, dice)
            limits = limits_for(cc)
            if shape is None or kernel.kind_problem(shape) or kernel.head_dim_problem(shape):
                continue
            config = KernelConfig.of(kernel.name, {name: dice.choice(own) for name, own in kernel.parameters.items()})
            if not kernel.shape_problem(shape, limits) and not kernel.rule_violations(config, shape, limits):
                return cls(config, shape, cc)


def _shape(kernel: AttentionKernel, dice: random.Random) -> AttentionShape | None:
    """Return a shape that the kernel may compute, or None where its features contradict each other."""
    head_dim, decoding = dice.choice((*HEAD_DIMS, *USUAL_HEAD_DIMS)), "decode" in kernel.name
    groups = dice.choice((1, 4, 8))
    try:
        features = Features.parse(" ".join(_words(kernel, dice)))
        return AttentionShape(
            direction=kernel.direction,
            dtype=dice.choice(sorted(kernel.dtypes)),
            batch=2,
            num_heads=2 * groups,
            num_heads_kv=2,
            seqlen_q=dice.choice((1, 4)) if decoding else dice.choice((1000, 4096)),
            seqlen_k=dice.choice((1000, 4096)),
            head_dim=head_dim,
            head_dim_v=head_dim if dice.random() < 0.8 else dice.choice(USUAL_HEAD_DIMS),
            causal=dice.choice((Causal.NONE, Causal.UPPER_LEFT, Causal.LOWER_RIGHT)),
            features=features,
        )
    except UsageError:
        return None


def _words(kernel: AttentionKernel, dice: random.Random) -> Iterable[str]:
    """Return the words of up to two features that the kernel knows, and those that it asks for."""
    known = sorted(kernel.features)
    words = set(dice.sample(known, min(len(known), dice.choice((0, 1, 1, 2)))))
    if any(name.startswith("kv=") for name in known):
        words |= {"cached", dice.choice(("kv=int8", "kv=e4m3"))} if not words & {"kv=int8", "kv=e4m3"} else {"cached"}
    words |= {"block_sparse"} & set(known)
    texts = {"paged": "cached page=64", "window": "window=255:0"}
    return " ".join(texts.get(word, word) for word in sorted(words)).split()


def _compile(specs: Sequence[CompileSpec], cc: tuple[int, int], answers: Connection) -> None:
    try:
        answers.send({"allocated": [allocated_by(spec, cc) for spec in specs]})
    except Exception as error:  # compilers raise what they like
        answers.send({"failed": f"{type(error).__name__}: {error}"[:300]})


def compile_case(case: DrawnCase) -> dict[str, Any]:
    """Return what the compiler allocates for each launch of a case, or how the compile ended."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_compile, args=(case.specs, case.cc, sender))
    worker.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(TIMEOUT_S) else {"failed": f"more than {TIMEOUT_S:.0f} s"}
    except EOFError:
        return {"failed": "the compiler ended its process"}
    finally:
        worker.kill()
        worker.join()


def row(number: int) -> dict[str, Any]:
    """Return a line of the file."""
    case = DrawnCase.draw(number)
    begun = time.monotonic()
    found = compile_case(case)
    shape, config = case.shape.to_json(), case.config.to_json()
    return {
        "case": number,
        "cc": case.cc,
        "config": config,
        "shape": shape,
        "seconds": time.monotonic() - begun,
    } | found


def verdict(row: dict[str, Any]) -> str:
    """Return how a line's prediction of today compares with what was allocated."""
    if "failed" in row:
        return "did not compile"
    least, most = DrawnCase.of_row(row).bounds_bytes
    allocated = max(shared for shared, _ in row["allocated"])
    if least == allocated == most:
        return "equal"
    if least > allocated:
        return "least above"
    if most < allocated:
        return "most below"
    return "bound within 1 KiB" if most - allocated <= MOST_ABOVE_BYTES else "bound too wide"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the verdicts by kernel."""
    counts: dict[str, Counter[str]] = {}
    for one in rows:
        for group in ("all", one["config"]["kernel"]):
            counts.setdefault(group, Counter())[verdict(one)] += 1
    return "\n".join(
        f"{group:24} {sum(found.values()):5} {dict(found.most_common())}" for group, found in counts.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument(
        "--first", type=int, default=0, help="the number of the first case; later ones are not yet seen"
    )
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    import triton  # noqa: F401  before the processes are forked

    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    known, begun = {one["case"] for one in rows}, time.monotonic()
    with asked.out.open("a") as file:
        for number in range(asked.first, asked.first + asked.cases):
            if number in known:
                continue
            if time.monotonic() - begun > asked.seconds:
                break
            rows.append(row(number))
            print(json.dumps(rows[-1]), file=file, flush=True)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
