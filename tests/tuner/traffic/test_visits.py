"""Which key tiles are visited, against a count over the mask itself."""

import pytest

from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.traffic.visited_tiles import visits_of

pytestmark = pytest.mark.triton_free


def shape(seqlen_q: int, seqlen_k: int, causal: Causal) -> AttentionShape:
    return AttentionShape(
        batch=1,
        num_heads=1,
        num_heads_kv=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=64,
        head_dim_v=64,
        causal=causal,
    )


def tile_sees(shape: AttentionShape, rows: range, columns: range) -> tuple[bool, bool]:
    """Whether a tile of the mask has a visible pair, and whether it has an invisible one. Rows past the end count: the
    kernels compute them, and columns past the end are invisible."""

    def visible(row: int, column: int) -> bool:
        if column >= shape.seqlen_k:
            return False
        return shape.causal is Causal.NONE or column <= row + shape.causal_offset

    pairs = [visible(row, column) for row in (rows[0], rows[-1]) for column in (columns[0], columns[-1])]
    return any(pairs), not all(pairs)


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(256, 256), (200, 200), (64, 300), (300, 64), (1, 100), (100, 1)])
@pytest.mark.parametrize(("block_m", "block_n"), [(64, 64), (128, 32), (32, 128)])
def test_visits_are_those_of_the_mask(causal: Causal, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> None:
    problem = shape(seqlen_q, seqlen_k, causal)
    visited_counts, masked = [], 0
    for start in range(0, seqlen_q, block_m):
        rows = range(start, start + block_m)
        tiles = [tile_sees(problem, rows, range(n, n + block_n)) for n in range(0, seqlen_k, block_n)]
        seen = [invisible for visible, invisible in tiles if visible]
        visited_counts.append(max(1, len(seen)))
        masked += sum(seen) if seen else 1
    visits = visits_of(problem, block_m, block_n)
    assert visits.query_tiles == len(visited_counts)
    assert visits.total == sum(visited_counts)
    assert visits.longest == max(visited_counts)
    assert visits.masked == masked
    assert visits.mean == pytest.approx(sum(visited_counts) / len(visited_counts))
