"""Times decoding on the current GPU and writes the tables of notes/kernels/decoding.md.

    python -P -m tools.bench.serving.decoding results/h200

writes results/h200.decode-queries.table.json, .decode-pages.table.json, .decode-peers.table.json and
.decode8.table.json. Each row has what a call gets out of the box, checked against a reference first; what stands
beside each other in a table was timed in turns in one run, over caches whose entries are all full.
"""

import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from blocktune import attention
from blocktune.db.exchange.document import save_text
from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS
from blocktune.kernels.values.features import NO_FEATURES, Features
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.flash_peers import FLASH_PEERS
from blocktune.tuner.compare.peers import BACKENDS, sdpa_compute
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.correctness.checks_of_shape import questions_of
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.correctness.inputs import key_bytes, make_inputs
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.protocol import column, median_ratio
from tests.kernels.hopper.decode.reading import reading
from tests.support.ranks.document import new_document, table

ROUNDS = 32
BATCHES = (1, 8, 64)
SMALL_BATCHES = (1, 8)
QUERIES = (1, 2, 4, 8, 16)
PAGES = (16, 32, 64, 128, 256)
SHORT_QUERIES = (1, 4, 8, 16)
SHORT = ("kv=e4m3", "kv=int8", "kv=e4m3 token_scales", "kv=int8 token_scales")
HOW = (
    f"medians of {ROUNDS} rounds in turns, the L2 cache overwritten before every launch; 32:8 heads, 8192 keys, head "
    "dimension 128, bfloat16 queries, every entry full, what a call gets out of the box."
)

Run = Callable[[], None]
Table = tuple[str, Sequence[str], list[list[str]]]


@dataclass(frozen=True, slots=True)
class Timed:
    """A contender: its label, the config that it ran (None of a peer), and its times in microseconds."""

    label: str
    config: KernelConfig | None
    times_us: Sequence[float]

    @property
    def time_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def row(self) -> tuple[str, str, str]:
        """Its label, config and time as cells of a table."""
        config = "" if self.config is None else f"`{self.config.label}`"
        return self.label, config, f"{self.time_us:.1f}"

    def as_fast_as(self, other: "Timed") -> float:
        """Return how many times as fast this is."""
        return median_ratio(other.times_us, self.times_us)


def decoding(batch: int, cache: str | None = None, seqlen_q: int = 1) -> AttentionShape:
    """Return a shape of one query or a few. cache: what its cache is like, where entries have lengths of their own."""
    sizes = {"batch": batch, "num_heads": 32, "num_heads_kv": 8, "seqlen_k": 8192, "head_dim": 128}
    found = NO_FEATURES if cache is None else Features.parse(f"cached {cache}")
    return AttentionShape(**sizes, seqlen_q=seqlen_q, features=found)


def dispatch_config(shape: AttentionShape) -> KernelConfig:
    """Return what a call gets out of the box."""
    config = attention.explain(shape).config
    assert config is not None, shape.label
    return config


def compile_ahead(jobs: Iterable[tuple[AttentionShape, KernelConfig]]) -> None:
    """Fill Triton's cache in as many processes as there are processors."""
    with CompileFarm(need_code=True) as farm:
        cc = current_device().limits.cc
        futures = [farm.submit(config.kernel, config, shape, cc) for shape, config in jobs]
        for future in futures:
            future.result()


def check_config(shape: AttentionShape, config: KernelConfig) -> None:
    """Compare a config with the reference.

    Raises:
        RuntimeError: it computes something else.
    """
    for question in questions_of(shape, device="cuda", seed=1):
        out, lse = question.new_result(), question.new_lse()
        question.poison(out)
        question.thunk(get_kernel(config.kernel).bind(config, shape), out, lse)()
        problem = question.problem(out, lse)
        if problem is not None:
            raise RuntimeError(f"{shape.label}, {config.label}: {problem}")


def launch_of(shape: AttentionShape, config: KernelConfig) -> Run:
    """Return the launch of a config over entries that are all full."""
    inputs = make_inputs(shape, device="cuda", seed=2)
    given = [inputs.q, inputs.k, inputs.v, torch.empty_like(inputs.q), None, softmax_scale(shape)]
    if inputs.extras != NO_EXTRAS:
        lengths = torch.full((shape.batch,), shape.seqlen_k, dtype=torch.int32, device="cuda")
        given.append(replace(inputs.extras, cache_seqlens=lengths))
    return functools.partial(get_kernel(config.kernel).bind(config, shape).pinned(*given), *given)  # type: ignore[attr-defined]


def peers(shape: AttentionShape) -> dict[str, Run]:
    """Return cuDNN, FlashAttention-2 and -3, where they are installed, and what only reads the keys and values."""
    question = questions_of(shape, device="cuda", seed=2)[0]
    computes = {name: sdpa_compute(shape, backend) for name, backend in BACKENDS.items()}
    if FLASH_PEERS["fa3"].version is not None:
        computes["fa3"] = FLASH_PEERS["fa3"].compute(shape, question)
    tensors = question.q, question.k, question.v
    found = {name: functools.partial(compute, *tensors) for name, compute in computes.items()}
    return found | {"reading alone": reading(shape, dispatch_config(shape), question.k, question.v)}


def time_all(
    clock: CudaClock, configs: Mapping[str, tuple[AttentionShape, KernelConfig]], others: Mapping[str, Run]
) -> list[Timed]:
    """Check our configs and time all in turns."""
    for shape, config in configs.values():
        check_config(shape, config)
    runs = {label: launch_of(*pair) for label, pair in configs.items()} | dict(others)
    rounds = clock.rounds(list(runs.values()), ROUNDS)
    found = {label: column(rounds, number) for number, label in enumerate(runs)}
    torch.cuda.empty_cache()
    return [Timed(label, configs[label][1] if label in configs else None, times) for label, times in found.items()]


def queries_table(time: Callable[..., list[Timed]]) -> Table:
    rows = []
    for batch in BATCHES:
        found = time({str(queries): decoding(batch, seqlen_q=queries) for queries in QUERIES})
        for one in found:
            rate_gbs = key_bytes(decoding(batch)) / one.time_us / 1e3
            rows.append([str(batch), *one.row, f"{rate_gbs:.0f}", f"{one.as_fast_as(found[0]):.3f}"])
    return "decode-queries", ("batch", "queries", "config", "µs", "GB/s", "of one query's"), rows


def pages_table(time: Callable[..., list[Timed]]) -> Table:
    rows = []
    for batch in SMALL_BATCHES:
        shapes = {"contiguous": decoding(batch, "")}
        shapes |= {str(page): decoding(batch, f"page={page}") for page in PAGES}
        found = time(shapes)
        rows += [[str(batch), *one.row, f"{one.as_fast_as(found[0]):.3f}"] for one in found]
    return "decode-pages", ("batch", "page", "config", "µs", "of contiguous"), rows


def short_table(time: Callable[..., list[Timed]]) -> Table:
    rows = []
    for batch, queries in itertools.product(BATCHES, SHORT_QUERIES):
        shapes = {"16 bits": decoding(batch, seqlen_q=queries)}
        shapes |= {kind: decoding(batch, kind, queries) for kind in SHORT}
        found = time(shapes)
        rows += [[str(batch), str(queries), *one.row, f"{one.as_fast_as(found[0]):.2f}"] for one in found]
    return "decode8", ("batch", "queries", "cache", "config", "µs", "times as fast as 16 bits"), rows


def peers_table(time: Callable[..., list[Timed]]) -> Table:
    rows = []
    for batch in BATCHES:
        shape = decoding(batch)
        found = time({"ours": shape}, peers(shape))
        rows += [[str(batch), *one.row, f"{found[0].as_fast_as(one):.3f}"] for one in found]
    return "decode-peers", ("batch", "who", "config", "µs", "ours is times as fast"), rows


def all_shapes() -> list[AttentionShape]:
    paged = ("", *(f"page={page}" for page in PAGES))
    shapes = [decoding(batch, one) for batch in SMALL_BATCHES for one in paged]
    shapes += [decoding(batch, seqlen_q=queries) for batch in BATCHES for queries in QUERIES]
    many = itertools.product(BATCHES, SHORT_QUERIES)
    return shapes + [decoding(batch, one, queries) for batch, queries in many for one in SHORT]


def document(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    found = new_document(torch.device("cuda"))
    found["environment"] |= {"cudnn": str(torch.backends.cudnn.version())}
    return table(found, HOW, columns, rows)


def main(prefix: str) -> None:
    clock = CudaClock()
    compile_ahead((shape, dispatch_config(shape)) for shape in all_shapes())

    def time(shapes: Mapping[str, AttentionShape], others: Mapping[str, Run] | None = None) -> list[Timed]:
        return time_all(
            clock, {label: (shape, dispatch_config(shape)) for label, shape in shapes.items()}, others or {}
        )

    for made in (queries_table, short_table, peers_table, pages_table):
        name, columns, rows = made(time)
        text = json.dumps(document(columns, rows), indent=1, sort_keys=True, ensure_ascii=False)
        save_text(text + "\n", Path(f"{prefix}.{name}.table.json"))
        for row in rows:
            print(name, *row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
