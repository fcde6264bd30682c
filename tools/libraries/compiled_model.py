"""torch.compile of a model with kernels of liger-kernel and torchao that have tuners, with and without
`blocktune.install()`: what Inductor times before the first output, and how long that takes.

python -m tools.libraries.compiled_model FOLDER --out results/h200.compiled-model.table.json

FOLDER is that of package_process.py. Each start is a process of its own. A second start has all that the first one
kept; the last one has the store alone, as on another machine.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blocktune.db.exchange.document import save_text
from tests.support.ranks.document import new_document, table
from tools.libraries.offline_check import versions_in
from tools.libraries.package_process import paths_of, run_program

PACKAGES = ("liger-kernel", "torchao")
HIDDEN, TOKENS = 2048, 4096
STARTS = {
    "Inductor, empty caches": ("stock", "compiled"),
    "Inductor, second start": ("stock", "compiled"),
    "blocktune, empty caches: eager, then compiled": ("blocktune", "eager"),
    "blocktune, second start": ("blocktune", "compiled"),
    "blocktune, the store alone": ("blocktune", "compiled"),
}
"""Who tunes, and what the first call is."""
COLUMNS = (
    "start",
    "seconds to the first compiled output",
    "lists that Inductor timed",
    "configs that it timed",
    "races of blocktune",
    "GPU of a call",
    "error",
)
HOW = (
    f"torch.compile(fullgraph=True) of LigerDyT and a linear layer of torchao's 8-bit blockwise kernels, {TOKENS} "
    f"tokens of {HIDDEN}. Errors are relative to the output of the first row, in the Frobenius norm."
)


class Model(nn.Module):
    """A normalisation and an 8-bit linear layer."""

    def __init__(self) -> None:
        from liger_kernel.transformers.dyt import LigerDyT
        from torchao.prototype.blockwise_fp8_training import kernels

        super().__init__()
        self.norm, self.kernels = LigerDyT(HIDDEN), kernels
        weight = torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16)
        self.weight, self.scale = kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(weight)

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = self.kernels.triton_fp8_blockwise_act_quant_lhs(self.norm(x))
        out: Tensor = self.kernels.triton_fp8_gemm_1x128_128x128(rows, self.weight, scale, self.scale)
        return out


@contextmanager
def timed_by_inductor() -> Iterator[list[int]]:
    """Give the numbers of configs that Inductor times meanwhile, one for each kernel of a user with a list."""
    from torch._inductor.runtime.hints import HeuristicType
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found: list[int] = []
    stock = CachingAutotuner.benchmark_all_configs

    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.heuristic_type is HeuristicType.USER_AUTOTUNE:
            found.append(len(self.launchers))
        return stock(self, *args, **kwargs)

    CachingAutotuner.benchmark_all_configs = benchmark_all_configs
    try:
        yield found
    finally:
        CachingAutotuner.benchmark_all_configs = stock


@torch.no_grad()
def play(tuner: str, first: str, out: Path) -> None:
    """Compile the model and call it, print what that took as JSON, and save the output."""
    if tuner == "blocktune":
        import blocktune

        blocktune.install()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, x = Model(), torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    if first == "eager":
        model(x)
    races = _races()
    compiled = torch.compile(model, fullgraph=True)
    with timed_by_inductor() as timed:
        begun = time.monotonic()
        y = compiled(x)
        torch.cuda.synchronize()
        seconds = time.monotonic() - begun
    torch.save(y, out)
    from tools.libraries.first_steps import gpu_us

    answer = {"seconds": seconds, "timed": timed, "races": [races, _races()], "gpu_us": gpu_us(lambda: compiled(x))}
    sys.stdout.write(json.dumps(answer) + "\n")


def _races() -> int:
    from blocktune.runtime.autotuned.kernel import kernels

    return sum(choice.tuned for kernel in kernels for choice in kernel.choices.values())


def measure(folder: Path, seconds: float) -> list[list[str]]:
    """Return the rows of all starts."""
    end, rows = time.monotonic() + seconds, list[list[str]]()
    with tempfile.TemporaryDirectory() as place:
        right = Path(place, "0.pt")
        for number, (title, (tuner, first)) in enumerate(STARTS.items()):
            caches, out = Path(place, tuner), Path(place, f"{number}.pt")
            if title == "blocktune, the store alone":
                for name in ("triton", "inductor"):
                    shutil.rmtree(caches / name)
            words = ("compiled_model", "--play", tuner, first, str(out), str(folder))
            lines, problem = run_program(words, paths_of(folder, PACKAGES), caches, end - time.monotonic())
            rows.append([title, *_cells(lines[-1], right, out)] if lines else [title, problem, *[""] * 5])
            sys.stdout.write("  ".join(rows[-1]) + "\n")
            sys.stdout.flush()
    return rows


def _cells(answer: dict[str, Any], right: Path, out: Path) -> list[str]:
    wanted, found = (torch.load(path).double() for path in (right, out))
    before, after = answer["races"]
    return [
        f"{answer['seconds']:.1f} s",
        str(len(answer["timed"])),
        str(sum(answer["timed"])),
        f"{before} before, {after - before} meanwhile",
        f"{answer['gpu_us']:.1f} µs",
        f"{float((found - wanted).norm() / wanted.norm()):.1e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--play", nargs=3, metavar=("TUNER", "FIRST", "FILE"), help="be a process that is measured")
    given = parser.parse_args()
    if given.play:
        play(given.play[0], given.play[1], Path(given.play[2]))
        return
    rows = measure(given.folder, given.seconds)
    document = new_document(torch.device("cuda"))
    document["environment"] |= versions_in(given.folder)
    found = table(document, HOW, COLUMNS, rows)
    save_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", given.out)


if __name__ == "__main__":
    main()
