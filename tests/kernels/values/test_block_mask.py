"""Block masks: constructors, lists and what they refuse."""

from typing import Any

import pytest
import torch

from blocktune.kernels.portable.forward.sparse_tiles import tile_shift
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape

pytestmark = pytest.mark.triton_free


def shape(**changes: Any) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 50, "seqlen_k": 70, "head_dim": 16}
    return AttentionShape(**sizes | {"head_dim_v": 16, "features": Features(mask=MaskKind.BLOCK_SPARSE)} | changes)


def test_from_dense_and_back() -> None:
    dense = torch.zeros(50, 70, dtype=torch.bool)
    dense[:16, 32:64] = True
    dense[32:48, :32] = True
    dense[48:, 64:] = True  # the last block in both directions reaches beyond the sequences
    mask = BlockMask.from_dense(dense, block_q=16, block_k=32)
    assert mask.mask.shape == (1, 1, 4, 3)
    assert mask.mask[0, 0].nonzero().tolist() == [[0, 1], [2, 0], [3, 2]]
    assert mask.density == pytest.approx(3 / 12)
    assert torch.equal(mask.to_dense(50, 70)[0, 0], dense)
    assert mask.to_dense().shape == (1, 1, 64, 96)
    mask.check_fits(shape())


def test_from_dense_keeps_heads_and_batches() -> None:
    dense = torch.rand(2, 4, 2, 3, generator=torch.Generator().manual_seed(1)) < 0.5
    pairs = dense.repeat_interleave(32, 2).repeat_interleave(16, 3)
    assert torch.equal(BlockMask.from_dense(pairs, block_q=32, block_k=16).mask, dense)
    assert torch.equal(BlockMask.from_dense(pairs[0], block_q=32, block_k=16).mask, dense[:1])


def test_a_partial_block_is_refused_by_name() -> None:
    dense = torch.ones(2, 64, 64, dtype=torch.bool)
    dense[1, 40, 50] = False
    dense[1, 60, 60] = False
    dense[1, 40, 10] = False
    with pytest.raises(UsageError, match=r"queries 32\.\. and keys 0\.\. \(batch 0, head 1\).*1 more.*`attn_mask`"):
        BlockMask.from_dense(dense, block_q=32, block_k=32)


def test_from_predicate() -> None:
    mask = BlockMask.from_predicate(
        lambda q_block, k_block: (q_block - k_block).abs() < 2, seqlen_q=50, seqlen_k=70, block_q=16, block_k=16
    )
    rows, columns = torch.arange(4)[:, None], torch.arange(5)[None, :]
    assert torch.equal(mask.mask[0, 0], (rows - columns).abs() < 2)


def test_a_predicate_of_keys_alone_serves_all_rows_and_heads_come_in_front() -> None:
    sizes = {"seqlen_q": 50, "seqlen_k": 70, "block_q": 16, "block_k": 16}
    mask = BlockMask.from_predicate(lambda q_block, k_block: k_block < 2, **sizes)
    assert mask.mask.shape == (1, 1, 4, 5)
    assert mask.mask[..., :2].all()
    assert not mask.mask[..., 2:].any()
    heads = torch.arange(4)[:, None, None]
    mask = BlockMask.from_predicate(lambda q_block, k_block: (q_block + k_block) % 4 == heads, **sizes)
    assert mask.mask.shape == (1, 4, 4, 5)
    assert torch.equal(mask.mask.sum(1), torch.ones(1, 4, 5, dtype=torch.int64))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(512, 512), (500, 512), (256, 512), (512, 200), (16, 300)])
def test_a_butterfly_connects_every_pair_in_few_layers(seqlen_q: int, seqlen_k: int) -> None:
    mask = BlockMask.butterfly(seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_q=32, block_k=32).mask[0, 0]
    rows, columns = mask.shape
    for row in range(rows):
        for column in range(columns):
            fewer = min(rows, columns)
            differing = (row * fewer // rows) ^ (column * fewer // columns)
            assert bool(mask[row, column]) == (differing.bit_count() <= 1)
    if rows == columns:
        step, reached = mask.float(), torch.eye(rows)
        for _ in range((rows - 1).bit_length()):
            reached = reached @ step
        assert (reached > 0).all()
        assert mask.sum() == rows * (1 + rows.bit_length() - 1)


@pytest.mark.parametrize(("block_q", "block_k"), [(16, 16), (64, 16), (16, 64)])
@pytest.mark.parametrize(("local", "global_tokens"), [(0, 0), (1, 0), (40, 0), (40, 17), (5, 200)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(128, 128), (100, 150), (150, 100)])
def test_local_and_global_blocks_are_those_with_such_a_pair(
    block_q: int, block_k: int, local: int, global_tokens: int, seqlen_q: int, seqlen_k: int
) -> None:
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
    found = BlockMask.local_and_global(local=local, global_tokens=global_tokens, **sizes).mask[0, 0]
    whole_q, whole_k = found.shape[0] * block_q, found.shape[1] * block_k
    query, key = torch.arange(whole_q)[:, None], torch.arange(whole_k)[None, :]
    near = (query + seqlen_k - seqlen_q - key).abs() <= local
    pairs = near | (key < global_tokens) | (query < global_tokens)
    blocks = pairs.reshape(found.shape[0], block_q, found.shape[1], block_k).any(3).any(1)
    assert torch.equal(found, blocks)


def test_patterns_refuse_what_other_masks_refuse() -> None:
    sizes = {"seqlen_q": 64, "seqlen_k": 64, "block_q": 32, "block_k": 32}
    with pytest.raises(UsageError, match="must not be negative"):
        BlockMask.local_and_global(local=-1, **sizes)
    for wrong in ({"block_q": 0}, {"block_k": 24}, {"seqlen_q": 0}):
        with pytest.raises(UsageError):
            BlockMask.butterfly(**sizes | wrong)
        with pytest.raises(UsageError):
            BlockMask.local_and_global(local=0, **sizes | wrong)


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_lists_name_the_active_blocks_in_order(name: str) -> None:
    mask = BlockMask(64, 64, torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.4)
    active = mask.mask if name == "rows" else mask.mask.transpose(-1, -2)
    lists = getattr(mask, name)
    assert getattr(mask, name) is lists  # made once
    assert lists.indices.dtype == lists.before.dtype == torch.int32
    assert lists.indices.shape == lists.before.shape == (*active.shape[:3], active.shape[3] + 1)
    assert torch.equal(lists.counts, active.sum(-1).to(torch.int32))
    for place in torch.cartesian_prod(*(torch.arange(size) for size in active.shape[:3])).tolist():
        row = active[tuple(place)]
        count = int(row.sum())
        numbers = lists.indices[tuple(place)]
        assert numbers[:count].tolist() == row.nonzero()[:, 0].tolist()
        assert ((numbers >= 0) & (numbers < row.numel())).all()
        assert lists.before[tuple(place)].tolist() == [int(row[:end].sum()) for end in range(row.numel() + 1)]


def test_strides_are_zero_where_one_list_serves_all() -> None:
    one, all_heads = torch.ones(1, 1, 5, 7, dtype=torch.bool), torch.ones(1, 3, 5, 7, dtype=torch.bool)
    mask = BlockMask(16, 16, one)
    assert mask.strides(mask.rows) == (0, 0, 8)
    assert mask.strides(mask.columns) == (0, 0, 6)
    mask = BlockMask(16, 16, all_heads)
    assert mask.strides(mask.rows) == (0, 40, 8)


@pytest.mark.parametrize("size", [8, 48, 0, -64, 64.0, 2**31, 2**40])
def test_block_sizes(size: Any) -> None:
    with pytest.raises(
        UsageError, match=r"`block_k` of a BlockMask must be a power of two of at least 16 and below 2\*\*31, but got"
    ):
        BlockMask(64, size, torch.ones(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(UsageError, match="`block_q` of a BlockMask"):
        BlockMask.from_dense(torch.ones(64, 64, dtype=torch.bool), block_q=size, block_k=64)


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2, dtype=torch.uint8), [[True]]])
def test_a_mask_is_boolean(mask: Any) -> None:
    with pytest.raises(UsageError, match="must be a boolean tensor"):
        BlockMask(64, 64, mask)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 2), (1, 1, 0, 2), (1, 1, 1, 2, 2)])
def test_a_mask_has_four_dimensions(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="query blocks, key blocks"):
        BlockMask(64, 64, torch.ones(sizes, dtype=torch.bool))


def test_constructors_refuse_what_is_no_mask() -> None:
    with pytest.raises(UsageError, match=r"torch.float32 \(64, 64\)"):
        BlockMask.from_dense(torch.ones(64, 64), block_q=64, block_k=64)
    with pytest.raises(UsageError, match="Lengths must be positive"):
        BlockMask.from_predicate(lambda q, k: q == k, seqlen_q=0, seqlen_k=64, block_q=64, block_k=64)
    with pytest.raises(UsageError, match="must return a boolean tensor"):
        BlockMask.from_predicate(lambda q, k: q - k, seqlen_q=64, seqlen_k=64, block_q=64, block_k=64)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((1, 1, 4, 4), r"must have \(4, 5\) blocks, but got \(4, 4\)"),
        ((3, 1, 4, 5), r"batch=3, heads=1"),
        ((1, 2, 4, 5), r"batch=1, heads=2"),  # key heads: the mask counts query heads
    ],
)
def test_a_mask_of_another_shape(sizes: tuple[int, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        BlockMask(16, 16, torch.ones(sizes, dtype=torch.bool)).check_fits(shape())
    BlockMask(16, 16, torch.ones(2, 4, 4, 5, dtype=torch.bool)).check_fits(shape())


def test_tiles_of_a_block() -> None:
    assert [tile_shift("block_n", 128, tile) for tile in (128, 64, 32, 16)] == [0, 1, 2, 3]
    with pytest.raises(
        UsageError, match=r"`block_n` must divide the mask's blocks, but got block_n=128 for blocks of 64"
    ):
        tile_shift("block_n", 64, 128)
