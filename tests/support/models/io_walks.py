"""The loops of the kernels in numpy, over a memory that counts. Tiles are found by looking at every pair of a tile.

Each function computes the whole result, so that a walk that loads too little is wrong and not merely cheap.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from blocktune.kernels.values.features import UNLIMITED, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.models.counting_memory import CountingMemory

Sees = Callable[[Any, Any], Any]
"""Whether queries see keys by their numbers, wherever the sequences end."""


def sees_of(shape: AttentionShape) -> Sees:
    """Causal mask and window, from their definitions."""
    left, right = shape.features.window or (UNLIMITED, UNLIMITED)
    offset = 0 if shape.causal is Causal.UPPER_LEFT else shape.seqlen_k - shape.seqlen_q

    def sees(rows: Any, columns: Any) -> Any:
        distance = columns[None, :] - rows[:, None] - offset
        seen = np.ones(distance.shape, bool)
        if shape.causal is not Causal.NONE:
            seen &= distance <= 0
        if left != UNLIMITED:
            seen &= distance >= -left
        if right != UNLIMITED:
            seen &= distance <= right
        return seen

    return sees


def inputs(shape: AttentionShape, seed: int = 0) -> CountingMemory:
    """q, k, v, dout, and mask if the shape has one, in 16 bits; out and lse from the definition."""
    dice = np.random.default_rng(seed)
    batch, heads, heads_kv = shape.batch, shape.num_heads, shape.num_heads_kv

    def normal(*sizes: int) -> Any:
        return dice.standard_normal(sizes).astype(np.float16)

    memory = CountingMemory(
        q=normal(batch, heads, shape.seqlen_q, shape.head_dim),
        k=normal(batch, heads_kv, shape.seqlen_k, shape.head_dim),
        v=normal(batch, heads_kv, shape.seqlen_k, shape.head_dim_v),
        dout=normal(batch, heads, shape.seqlen_q, shape.head_dim_v),
    )
    pairs = (shape.seqlen_q, shape.seqlen_k)
    if shape.features.mask is MaskKind.BOOLEAN:
        memory.arrays["mask"] = dice.random(pairs) < 0.75
    elif shape.features.mask is MaskKind.ADDITIVE:
        memory.arrays["mask"] = normal(*pairs)
    return memory


def empty(memory: CountingMemory, name: str, sizes: tuple[int, ...], dtype: Any = np.float16) -> None:
    """Memory that nobody has written."""
    memory.arrays[name] = np.full(sizes, np.nan, dtype)


def wide_scores(memory: CountingMemory, shape: AttentionShape, blocks: Any = None) -> Any:
    """All scores [batch, heads, seqlen_q, seqlen_k], -inf where a pair takes no part."""
    arrays = memory.arrays
    k = arrays["k"].repeat(shape.group_size, 1).astype(np.float32)
    scores = arrays["q"].astype(np.float32) @ k.swapaxes(-1, -2) * shape.head_dim**-0.5
    seen = sees_of(shape)(np.arange(shape.seqlen_q), np.arange(shape.seqlen_k))
    if shape.features.mask is MaskKind.BOOLEAN:
        seen = seen & arrays["mask"]
    elif shape.features.mask is MaskKind.ADDITIVE:
        scores = scores + arrays["mask"].astype(np.float32)
    seen = np.broadcast_to(seen, scores.shape)
    return np.where(seen if blocks is None else seen & blocks, scores, -np.inf)


def forward_of(memory: CountingMemory, shape: AttentionShape, blocks: Any = None) -> tuple[Any, Any]:
    """(out, lse) from the definition; a row without keys gives 0 and -inf."""
    scores = wide_scores(memory, shape, blocks)
    best = np.maximum(scores.max(-1, keepdims=True), -1e30)
    p = np.exp(scores - best)
    total = p.sum(-1, keepdims=True)
    v = memory.arrays["v"].repeat(shape.group_size, 1).astype(np.float32)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(total == 0, 1, total), (best + np.log(total))[..., 0]


def gradients_of(memory: CountingMemory, shape: AttentionShape, blocks: Any = None) -> dict[str, Any]:
    """dq, dk and dv from the definition, given out and lse in memory."""
    arrays, group = memory.arrays, shape.group_size
    k, v = (arrays[name].repeat(group, 1).astype(np.float32) for name in "kv")
    dout, scale = arrays["dout"].astype(np.float32), shape.head_dim**-0.5
    lse = np.where(np.isinf(arrays["lse"]), np.inf, arrays["lse"])
    p = np.exp(wide_scores(memory, shape, blocks) - lse[..., None])
    delta = (dout * arrays["out"].astype(np.float32)).sum(-1)
    ds = p * (dout @ v.swapaxes(-1, -2) - delta[..., None])

    def of_group(gradient: Any) -> Any:
        return gradient.reshape(shape.batch, shape.num_heads_kv, group, *gradient.shape[2:]).sum(2)

    dk = ds.swapaxes(-1, -2) @ arrays["q"].astype(np.float32) * scale
    return {"dq": ds @ k * scale, "dk": of_group(dk), "dv": of_group(p.swapaxes(-1, -2) @ dout)}


def walk_forward(
    memory: CountingMemory, shape: AttentionShape, block_m: int, block_n: int, *, clip: bool = True, blocks: Any = None
) -> None:
    """Blocks own queries. clip: rows past the last query see nothing. blocks: what a block mask shows, by pairs."""
    empty(memory, "o", (*memory.arrays["q"].shape[:3], shape.head_dim_v))
    empty(memory, "lse", memory.arrays["q"].shape[:3], np.float32)
    with memory.launch("forward"):
        for batch, head, rows, owned in _tiles(shape.batch, shape.num_heads, shape.seqlen_q, block_m):
            q = memory.load("q", (batch, head, owned))
            parts = []
            for keys, walked in _visited(shape, rows, owned, block_n, clip, blocks, (batch, head)):
                place = (batch, head // shape.group_size, walked)
                k, v = memory.load("k", place), memory.load("v", place)
                parts.append((_scores(memory, shape, q, k, rows, keys, owned, walked), v))
            _finish_rows(memory, (batch, head, owned), parts, shape)


def walk_delta(memory: CountingMemory, shape: AttentionShape, *, sums: bool, own_lse: bool = False) -> None:
    """Row sums, and zeros in the sums of dq."""
    rows = memory.arrays["q"].shape[:3]
    empty(memory, "delta", rows, np.float32)
    if sums:
        empty(memory, "sums", (*rows, shape.head_dim), np.float32)
    with memory.launch("delta"):
        place = (slice(None),) * 3
        products = memory.load("out", place) * memory.load("dout", place)
        memory.store("delta", place, products.sum(-1))
        if own_lse:
            memory.store("lse", place, memory.load("lse", place))
        if sums:
            memory.store("sums", place, 0.0)


def walk_keys(
    memory: CountingMemory, shape: AttentionShape, block_m: int, block_n: int, *, sums: bool = False, clip: bool = True,
    blocks: Any = None,
) -> None:  # fmt: skip
    """Blocks own keys of a key head and walk the queries of its group, for dk and dv, and dq / scale if sums."""
    empty(memory, "dk", memory.arrays["k"].shape)
    empty(memory, "dv", memory.arrays["v"].shape)
    scale = shape.head_dim**-0.5
    with memory.launch("dk_dv"):
        for batch, head_kv, columns, owned in _tiles(shape.batch, shape.num_heads_kv, shape.seqlen_k, block_n):
            place = (batch, head_kv, owned)
            k, v = memory.load("k", place), memory.load("v", place)
            dk, dv = np.zeros_like(k), np.zeros_like(v)
            for head in range(head_kv * shape.group_size, (head_kv + 1) * shape.group_size):
                tiles = _visited_queries(shape, columns, owned, block_m, clip, blocks, (batch, head))
                for rows, walked in tiles:
                    at = (batch, head, walked)
                    q, dout = memory.load("q", at), memory.load("dout", at)
                    p, ds = _probabilities(memory, shape, at, q, dout, k, v, rows, columns, walked, owned)
                    dv += p.T @ dout
                    dk += ds.T @ q
                    if sums:
                        memory.add("sums", at, ds @ k)
            memory.store("dk", place, dk * scale)
            memory.store("dv", place, dv)


def walk_queries(
    memory: CountingMemory, shape: AttentionShape, block_m: int, block_n: int, *, clip: bool = True, blocks: Any = None
) -> None:
    """Blocks own queries, for dq."""
    empty(memory, "dq", memory.arrays["q"].shape)
    with memory.launch("dq"):
        for batch, head, rows, owned in _tiles(shape.batch, shape.num_heads, shape.seqlen_q, block_m):
            at = (batch, head, owned)
            q, dout = memory.load("q", at), memory.load("dout", at)
            lse, delta = memory.load("lse", at), memory.load("delta", at)
            dq = np.zeros_like(q)
            for keys, walked in _visited(shape, rows, owned, block_n, clip, blocks, (batch, head)):
                place = (batch, head // shape.group_size, walked)
                k, v = memory.load("k", place), memory.load("v", place)
                scores = _scores(memory, shape, q, k, rows, keys, owned, walked)
                p = np.exp(scores - np.where(np.isinf(lse), np.inf, lse)[:, None])
                dq += (p * (dout @ v.T - delta[:, None])) @ k
            memory.store("dq", at, dq * shape.head_dim**-0.5)


def walk_finish(memory: CountingMemory, shape: AttentionShape) -> None:
    """dq from its sums."""
    empty(memory, "dq", memory.arrays["q"].shape)
    with memory.launch("dq"):
        place = (slice(None),) * 3
        memory.store("dq", place, memory.load("sums", place) * shape.head_dim**-0.5)


def walk_decode(
    memory: CountingMemory, shape: AttentionShape, block_m: int, block_n: int, splits: int, parts: int
) -> None:
    """Packed rows of a group and one share of its keys a block; then a merge whose blocks own one of the `parts` of a
    row's columns."""
    rows_of_group = shape.group_size * shape.seqlen_q
    every = shape.batch * shape.num_heads * shape.seqlen_q
    empty(memory, "partial", (splits, every, shape.head_dim_v), np.float32)
    empty(memory, "statistics", (splits, every, 2), np.float32)
    empty(memory, "o", (every, shape.head_dim_v))
    memory.arrays["q"] = memory.arrays["q"].reshape(every, shape.head_dim)
    sees, numbers = sees_of(shape), np.arange(shape.seqlen_k)
    with memory.launch("split"):
        for batch, head_kv, packed, owned in _tiles(shape.batch, shape.num_heads_kv, rows_of_group, block_m):
            places = (batch * shape.num_heads_kv + head_kv) * rows_of_group + packed[: owned.stop - owned.start]
            rows = (places % rows_of_group) % shape.seqlen_q
            reached = sees(np.arange(shape.seqlen_q), numbers).any(0).nonzero()[0]  # by any query, in the tile or not
            stop_key = int(reached.max()) + 1 if len(reached) else 0
            tiles = sorted({int(key) // block_n for key in reached})
            for split in range(splits):
                q = memory.load("q", (places,))
                share = tiles[len(tiles) * split // splits : len(tiles) * (split + 1) // splits]
                found = []
                for tile in share:
                    walked = slice(tile * block_n, min((tile + 1) * block_n, stop_key))
                    k, v = (memory.load(name, (batch, head_kv, walked)) for name in "kv")
                    scores = q @ k.T * shape.head_dim**-0.5
                    found.append((np.where(sees(rows, numbers[walked]), scores, -np.inf), v))
                best, total, acc = _softmax(found, len(places), shape.head_dim_v)
                if splits == 1:
                    memory.store("o", (places,), acc / total[:, None])
                else:
                    memory.store("partial", (split, places), acc)
                    memory.store("statistics", (split, places), np.stack([best, total], -1))
    if splits > 1:
        _merge(memory, shape, splits, parts)


def _merge(memory: CountingMemory, shape: AttentionShape, splits: int, parts: int) -> None:
    width = -(-shape.head_dim_v // parts)
    with memory.launch("merge"):
        for row in range(len(memory.arrays["o"])):
            for part in range(parts):
                columns = slice(part * width, (part + 1) * width)
                statistics = memory.load("statistics", (slice(None), row))
                best, total = statistics[:, 0], statistics[:, 1]
                weights = np.exp(best - best.max())
                o = memory.load("partial", (slice(None), row, columns))
                memory.store("o", (row, columns), weights @ o / (weights @ total))


def _tiles(batches: int, heads: int, length: int, block: int) -> Any:
    """(batch, head, numbers of the whole tile, the part of it inside the sequence) of every block of a grid."""
    for batch in range(batches):
        for head in range(heads):
            for start in range(0, length, block):
                yield batch, head, np.arange(start, start + block), slice(start, min(start + block, length))


def _visited(
    shape: AttentionShape, rows: Any, owned: slice, block_n: int, clip: bool, blocks: Any, head: tuple[int, int]
) -> Any:
    """Key tiles of which one of the rows sees a key, were there keys without end."""
    sees = sees_of(shape)
    for start in range(0, shape.seqlen_k, block_n):
        keys, walked = np.arange(start, start + block_n), slice(start, min(start + block_n, shape.seqlen_k))
        if blocks is not None and not blocks[head][owned, walked].any():
            continue
        if sees(rows[: owned.stop - owned.start] if clip else rows, keys).any():
            yield keys[: walked.stop - walked.start], walked


def _visited_queries(
    shape: AttentionShape, columns: Any, owned: slice, block_m: int, clip: bool, blocks: Any, head: tuple[int, int]
) -> Any:
    sees = sees_of(shape)
    for start in range(0, shape.seqlen_q, block_m):
        rows, walked = np.arange(start, start + block_m), slice(start, min(start + block_m, shape.seqlen_q))
        if blocks is not None and not blocks[head][walked, owned].any():
            continue
        if sees(rows, columns[: owned.stop - owned.start] if clip else columns).any():
            yield rows[: walked.stop - walked.start], walked


def _scores(
    memory: CountingMemory, shape: AttentionShape, q: Any, k: Any, rows: Any, keys: Any, owned: slice, walked: slice
) -> Any:
    """Scores of a tile of queries `owned` and keys `walked`, with the mask's tile loaded if there is one."""
    scores = q @ k.T * shape.head_dim**-0.5
    if "mask" in memory.arrays:
        mask = memory.load("mask", (owned, walked))
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    return np.where(sees_of(shape)(rows[: len(q)], keys[: len(k)]), scores, -np.inf)


def _probabilities(
    memory: CountingMemory, shape: AttentionShape, at: Any, q: Any, dout: Any, k: Any, v: Any, rows: Any, columns: Any,
    walked: slice, owned: slice,
) -> tuple[Any, Any]:  # fmt: skip
    lse, delta = memory.load("lse", at), memory.load("delta", at)
    scores = _scores(memory, shape, q, k, rows, columns, walked, owned)
    p = np.exp(scores - np.where(np.isinf(lse), np.inf, lse)[:, None])
    return p, p * (dout @ v.T - delta[:, None])


def _softmax(parts: Any, rows: int, width: int) -> tuple[Any, Any, Any]:
    """(maximum, sum, weighted values) of (scores, values) tiles."""
    if not parts:
        return np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32), np.zeros((rows, width), np.float32)
    scores, values = np.concatenate([scores for scores, _ in parts], 1), np.concatenate([v for _, v in parts])
    best = scores.max(1)
    p = np.exp(scores - np.maximum(best, -1e30)[:, None])
    return best, p.sum(1), p @ values


def _finish_rows(memory: CountingMemory, place: Any, parts: Any, shape: AttentionShape) -> None:
    rows = memory.arrays["q"][place].shape[0]
    best, total, acc = _softmax(parts, rows, shape.head_dim_v)
    memory.store("o", place, acc / np.where(total == 0, 1, total)[:, None])
    with np.errstate(divide="ignore"):
        memory.store("lse", place, np.maximum(best, -1e30) + np.log(total))
