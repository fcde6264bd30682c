"""Times paged batches with a fixed number of splits next to tuned ones, on the current GPU, and compares their bits.

    python -P -m tools.bench.serving.invariance results/h200.invariance.table.json

With a fixed number every sequence is computed alone first, and in the batch next to others that grow: its result has
to be equal to the bit. Then all are captured as CUDA graphs and timed in turns. "unsplit batch" lets single tokens take
the forward kernels of the prompts.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from blocktune.db.exchange.document import save_text
from blocktune.integrations import BatchAttention, PagedBatch
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.protocol import column, median_ratio
from tests.support.ranks.document import new_document, table

HEADS, HEADS_KV, DIM, PAGE = 32, 8, 128, 16
SCALE = DIM**-0.5
SPLITS = (1, 4, 8, 16, 32)
ROUNDS = 24
WINDOW = (1023, 0)
HOW = (
    f"medians of {ROUNDS} rounds in turns, captured as CUDA graphs, the L2 cache overwritten before every launch; "
    f"{HEADS}:{HEADS_KV} heads, head dimension {DIM}, bfloat16, causal, pages of {PAGE} in which the heads of a page "
    "follow each other; a column says how many times as long as tuned calls a fixed number of splits takes."
)
COLUMNS = ("batch", "window", "tuned, µs", *(f"{splits} splits" for splits in SPLITS), "unsplit batch")


@dataclass(frozen=True, slots=True)
class Load:
    """A batch of an engine: single tokens, each after `context` keys, then chunks of prompts at the end of theirs."""

    singles: int
    context: int
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def label(self) -> str:
        """The parts in words."""
        parts = [f"{self.singles} tokens over {self.context}"] if self.singles else []
        counted = itertools.groupby(self.chunks)
        return ", ".join([*parts, *(f"{len([*same])} x {queries} over {keys}" for (queries, keys), same in counted)])

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence."""
        return (((1, self.context),) * self.singles) + self.chunks


LOADS = (
    Load(1, 8192),
    Load(8, 8192),
    Load(64, 8192),
    Load(256, 2048),
    Load(0, 0, ((2048, 2048),) * 4),
    Load(0, 0, ((2048, 16384),) * 2),
    Load(64, 4096, ((2048, 2048),)),
    Load(128, 2048, ((512, 8192),) * 4),
    Load(32, 16384, ((300, 300), (700, 9000), (1000, 1000))),
)


def new_cache(load: Load) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pages of keys and of values, and the table, whose pages are in no order."""
    counts = [-(-keys // PAGE) for _, keys in load.lengths]
    rows = torch.randn(sum(counts), HEADS_KV, PAGE, 2 * DIM, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    pages = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
    for row, own in zip(pages, torch.randperm(sum(counts), device="cuda").int().split(counts), strict=True):
        row[: len(own)] = own
    k, v = rows.split(DIM, dim=-1)
    return k, v, pages


def batch_of(lengths: Sequence[tuple[int, int]], pages: Tensor) -> PagedBatch:
    """Return the batch of sequences with so many queries and keys, of which single tokens stand at the beginning."""
    queries = [count for count, _ in lengths]
    begins = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device="cuda")
    keys = torch.tensor([length for _, length in lengths], dtype=torch.int32, device="cuda")
    singles = len([*itertools.takewhile(lambda count: count == 1, queries)])
    return PagedBatch(begins, keys, pages, max(queries), singles)


def attended(layer: BatchAttention, q: Tensor, cache: tuple[Tensor, Tensor], batch: PagedBatch) -> Tensor:
    """Return the output.

    Raises:
        RuntimeError: no kernel of ours computes it.
    """
    out = torch.empty_like(q)
    if not layer.write(out, q, *cache, batch):
        raise RuntimeError(f"no kernel serves {batch.lengths.shape[0]} sequences")
    return out


def check_bits(layer: BatchAttention, load: Load) -> None:
    """Compare sequences alone, in a table of their own, with the same ones in the batch, and in a batch whose last
    prompt is shorter.

    Raises:
        RuntimeError: the result of a sequence differs.
    """
    k, v, pages = new_cache(load)
    lengths = load.lengths
    q = torch.randn(sum(count for count, _ in lengths), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    parts = q.split([count for count, _ in lengths])
    for dropped in (0, 1, 37) if load.chunks else (0,):
        queries, keys = lengths[-1]
        own = (*lengths[:-1], (queries - dropped, keys - dropped))
        shorter = (*parts[:-1], parts[-1][: queries - dropped])
        whole = attended(layer, torch.cat(shorter), (k, v), batch_of(own, pages)).split([each for each, _ in own])
        for number in {0, len(own) // 2, len(own) - 1}:
            count = -(-own[number][1] // PAGE)
            alone = batch_of(own[number : number + 1], pages[number : number + 1, :count])
            if not torch.equal(attended(layer, shorter[number], (k, v), alone), whole[number]):
                raise RuntimeError(f"{load.label}, {layer.num_splits} splits: sequence {number} differs from it alone")


def captured(compute: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a call's CUDA graph, after calls that compile its kernels."""
    for _ in range(3):
        compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph.replay


def row_of(load: Load, window: tuple[int, int], clock: CudaClock) -> list[str]:
    """Return the cells of a load."""
    layers = [BatchAttention(SCALE, window=window, num_splits=splits) for splits in (0, *SPLITS)]
    for layer in layers[1:]:
        check_bits(layer, load)
    k, v, pages = new_cache(load)
    q = torch.randn(sum(count for count, _ in load.lengths), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    batch = batch_of(load.lengths, pages)
    calls = [(layer, batch) for layer in layers] + [(layers[0], replace(batch, singles=0))]
    runs = [captured(functools.partial(attended, layer, q, (k, v), each)) for layer, each in calls]
    clock.heat(runs[0], 0.3)
    rounds = clock.rounds(runs, ROUNDS)
    tuned, *others = (column(rounds, number) for number in range(len(runs)))
    ratios = [f"{median_ratio(times, tuned):.3f}" for times in others]
    return [load.label, str(window[0]) if window[0] >= 0 else "", f"{sorted(tuned)[len(tuned) // 2]:.1f}", *ratios]


@torch.inference_mode()
def main(out: str) -> None:
    torch.manual_seed(0)
    clock, rows = CudaClock(), []
    for load, window in itertools.product(LOADS, ((-1, -1), WINDOW)):
        rows.append(row_of(load, window, clock))
        print(*rows[-1], sep=" | ", flush=True)
    found = table(new_document(torch.device("cuda")), HOW, COLUMNS, rows)
    save_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
