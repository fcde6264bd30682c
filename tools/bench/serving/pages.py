"""Times chunks of prompts over a paged cache beside the same keys in one piece, on the current GPU.

    python -P -m tools.bench.serving.pages results/h200.pages.table.json

Every launch has its default config and is checked against a reference first. `copied` is what calls over pages did
before kernels read them: the keys are copied in their order, and the plain kernel reads the copy.
"""

import functools
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blocktune.db.exchange.document import save_text
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.feature_tensors import NO_EXTRAS
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.dispatch.torch_math import gather_pages
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.correctness.inputs import make_inputs
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.protocol import column
from tests.support.ranks.document import new_document, table
from tools.bench.defaults import compile_ahead, default_of
from tools.bench.serving.decoding import Run, Timed, check_config

QUERIES = (64, 256, 1024, 4096)
KEYS = (4096, 16384, 65536)
PAGES = (16, 32, 64, 128, 256)
TOKENS, MOST_SEQUENCES = 4096, 8
"""Queries of a batch that a server computes together, and sequences that they are of at most."""
ROUNDS = 12
HEAT_SECONDS = 0.3
COPIED = 16
"""The page size of the keys that are copied."""
HOW = (
    f"medians of {ROUNDS} rounds in turns, the L2 cache overwritten before every launch; 32:8 heads, head dimension "
    "128, bfloat16, causal from the last key, default configs; a page's column says how many times as fast as with "
    "the keys in one piece."
)
COLUMNS = (
    "sequences", "queries", "keys", "one piece, µs", "TFLOP/s", *(f"page {page}" for page in PAGES), "copied first",
)  # fmt: skip


def chunk(queries: int, keys: int, page: int = 0) -> AttentionShape:
    """Return a chunk of `queries` for each sequence at the end of the keys, which are in one piece without pages."""
    return AttentionShape(
        batch=max(1, min(MOST_SEQUENCES, TOKENS // queries)),
        num_heads=32,
        num_heads_kv=8,
        seqlen_q=queries,
        seqlen_k=keys,
        head_dim=128,
        causal=Causal.LOWER_RIGHT,
        features=Features(cached=True, page_size=page) if page else Features(),
    )


def token_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [.., heads, tokens, dim] with the heads of a token next to each other, as servers have them."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def launches_of(shape: AttentionShape) -> dict[str, Run]:
    """Return the launch of a shape's default config over entries that are all full; of pages of `COPIED` also that of
    the plain kernel over a copy."""
    config, inputs = default_of(shape), make_inputs(shape, device="cuda", seed=2)
    tensors = [token_first(tensor) for tensor in (inputs.q, inputs.k, inputs.v)]
    given: list[Any] = [*tensors, torch.empty_like(tensors[0]), None, softmax_scale(shape)]
    if inputs.extras == NO_EXTRAS:
        return {"one piece": functools.partial(get_kernel(config.kernel).bind(config, shape).pinned(*given), *given)}
    lengths = torch.full((shape.batch,), shape.seqlen_k, dtype=torch.int32, device="cuda")
    given.append(replace(inputs.extras, cache_seqlens=lengths))
    bound: Any = get_kernel(config.kernel).bind(config, shape)
    found = {f"page {shape.features.page_size}": functools.partial(bound.pinned(*given), *given)}
    if shape.features.page_size == COPIED:
        plain = replace(shape, features=Features())
        launch: Any = get_kernel(default_of(plain).kernel).bind(default_of(plain), plain)

        def copied() -> None:
            keys = (gather_pages(cache, inputs.extras.block_table) for cache in tensors[1:])
            launch(tensors[0], *keys, *given[3:6])

        found["copied first"] = copied
    return found


def times_of(shapes: Mapping[int, AttentionShape], clock: CudaClock) -> dict[str, Timed]:
    """Return the times of all launches of a chunk, by their labels."""
    runs = {label: run for shape in shapes.values() for label, run in launches_of(shape).items()}
    clock.heat(next(iter(runs.values())), HEAT_SECONDS)
    rounds = clock.rounds(list(runs.values()), ROUNDS)
    found = {label: Timed(label, None, column(rounds, number)) for number, label in enumerate(runs)}
    torch.cuda.empty_cache()
    return found


def row_of(queries: int, keys: int, clock: CudaClock) -> list[str]:
    """Return the cells of a chunk."""
    shapes = {page: chunk(queries, keys, page) for page in (0, *PAGES)}
    found, plain = times_of(shapes, clock), shapes[0]
    whole = found.pop("one piece")
    copied = found.pop("copied first")
    rates = [f"{one.as_fast_as(whole):.3f}" for one in (*found.values(), copied)]
    rate_tflops = plain.flops / whole.time_us / 1e6
    return [str(plain.batch), str(queries), str(keys), f"{whole.time_us:,.1f}", f"{rate_tflops:.0f}", *rates]


def main(out: str) -> None:
    sizes, clock = list(itertools.product(QUERIES, KEYS)), CudaClock()
    shapes = [chunk(queries, keys, page) for (queries, keys), page in itertools.product(sizes, (0, *PAGES))]
    compile_ahead(shapes)
    for shape in shapes:
        if shape.seqlen_k == KEYS[0]:
            check_config(shape, default_of(shape))
    rows = []
    for queries, keys in sizes:
        rows.append(row_of(queries, keys, clock))
        print(*rows[-1], flush=True)
    found = table(new_document(torch.device("cuda")), HOW, COLUMNS, rows)
    save_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
