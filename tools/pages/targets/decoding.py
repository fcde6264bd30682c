"""The targets of decoding."""

from blocktune.kernels.values.shape import AttentionShape
from tools.pages.targets.target import BATCH_1, Target, benches, tables


def _one_long_query(shape: AttentionShape) -> bool:
    return shape.batch == 1 and shape.seqlen_q == 1 and shape.seqlen_k == 8192


DECODING = (
    Target(
        what="decoding, 2 to 16 queries, batch 1 and 8",
        least=0.95,
        ratio="of one query's GB/s",
        sources=tables(
            ".decode-queries.table.json",
            "of one query's",
            "one query",
            lambda cells: cells[0] in ("1", "8") and cells[1] != "1",
            ("batch", "queries"),
        ),
        limit=f"Partial results grow with the rows, and copies by `cp.async` cannot leave the L2 first. {BATCH_1}.",
    ),
    Target(
        what="decoding, pages of 16 to 256",
        least=0.97,
        ratio="of a contiguous cache",
        sources=tables(
            ".decode-pages.table.json",
            "of contiguous",
            "contiguous",
            lambda cells: cells[1] != "contiguous",
            ("batch", "page"),
        ),
        limit=f"The number of the first page is one more load before the first key. {BATCH_1}.",
    ),
    Target(
        what="decoding, batch 1, 8192 keys",
        least=1.5,
        sources=benches("-decode.bench.json", _one_long_query) + benches("-decode-peers.bench.json", _one_long_query),
        limit=(
            "The launch and the wait for the first bytes; after reading alone the target leaves less than the merge "
            f"takes. {BATCH_1}."
        ),
    ),
    Target(
        what="decoding, 8-bit caches, batch 8 and 64",
        least=1.7,
        ratio="over our 16 bits",
        sources=tables(
            ".decode8.table.json",
            "times as fast as 16 bits",
            "16 bits",
            lambda cells: cells[0] in ("8", "64") and cells[2].startswith("kv="),
            ("batch", "queries", "cache"),
        ),
        limit="No unit is full: a tile is loaded, converted and multiplied in turn, by two warps a scheduler. With 64 "
        "rows computing alone takes as long as reading. From 17 rows on, merging takes 7 of 52 to 57 µs at batch 8, "
        "by a second launch and by the last block of a tile alike. Scales of tokens are 3 % more bytes. "
        "[Caches of 8 bits with many rows](../kernels/lab_diary.md#caches-of-8-bits-with-many-rows).",
    ),
)
