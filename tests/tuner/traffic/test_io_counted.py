"""The IO models against loops that compute attention out of a memory that counts every byte
(tests/support/models/io_walks.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktune.kernels.portable.decode.launch import merge_arguments
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.traffic.backward import fused_backward_traffic, split_backward_traffic
from blocktune.tuner.traffic.decode import decode_traffic
from blocktune.tuner.traffic.forward import general_traffic
from blocktune.tuner.traffic.launches import Passes
from blocktune.tuner.traffic.sparse import Blocks, random_blocks, sparse_backward_traffic, sparse_forward_traffic
from tests.support.models.counting_memory import CountingMemory
from tests.support.models.io_walks import (
    forward_of,
    gradients_of,
    inputs,
    walk_decode,
    walk_delta,
    walk_finish,
    walk_forward,
    walk_keys,
    walk_queries,
)

pytestmark = pytest.mark.triton_free

EXAMPLES = settings(max_examples=40, deadline=None)
BLOCK = st.sampled_from([16, 32, 64])
WINDOWS = st.sampled_from([None, (0, 0), (40, 0), (13, 30), (-1, 20), (20, -1)])


def problem(
    queries: int, keys: int, causal: Causal, group: int, window: Any = None, mask: MaskKind = MaskKind.NONE
) -> AttentionShape:
    return AttentionShape(
        batch=2,
        num_heads=2 * group,
        num_heads_kv=2,
        seqlen_q=queries,
        seqlen_k=keys,
        head_dim=32,
        head_dim_v=16,
        dtype="float16",
        causal=causal,
        features=Features(window=window, mask=mask),
    )


LENGTHS = st.integers(1, 150)
SHAPES = st.builds(problem, LENGTHS, LENGTHS, st.sampled_from(Causal), st.integers(1, 3), WINDOWS)
MASKED = st.builds(
    lambda queries, keys, window, mask: problem(queries, keys, Causal.NONE, 2, window, mask),
    LENGTHS,
    LENGTHS,
    WINDOWS,
    st.sampled_from([MaskKind.BOOLEAN, MaskKind.ADDITIVE]),
)
SPARSE = st.builds(problem, LENGTHS, LENGTHS, st.sampled_from(Causal), st.integers(1, 3))


def assert_equal(memory: CountingMemory, modelled: Callable[[bool], Passes]) -> None:
    """Launch by launch and tensor by tensor, with and without a cache. What has no bytes need not be listed."""
    for perfect in (False, True):
        found = memory.counted(perfect_l2=perfect)
        counts = {one.name: one.to_json() for one in modelled(perfect).passes}
        for counted in counts.values():
            counted.pop("total_bytes")
        assert _without_zeros(counts) == _without_zeros(found)


def _without_zeros(counts: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return {name: {key: value for key, value in found.items() if value} for name, found in counts.items()}


def assert_close(found: Any, right: Any) -> None:
    np.testing.assert_allclose(found.astype(np.float32), right, rtol=2e-2, atol=2e-2)


def with_output(shape: AttentionShape, pairs: Any = None) -> CountingMemory:
    """Inputs of a backward."""
    memory = inputs(shape)
    out, lse = forward_of(memory, shape, pairs)
    memory.arrays |= {"out": out.astype(np.float16), "lse": lse.astype(np.float32)}
    return memory


def assert_right_gradients(memory: CountingMemory, shape: AttentionShape, pairs: Any = None) -> None:
    for name, right in gradients_of(memory, shape, pairs).items():
        assert_close(memory.arrays[name], right)


@EXAMPLES
@given(SHAPES | MASKED, BLOCK, BLOCK)
def test_the_general_forward(shape: AttentionShape, block_m: int, block_n: int) -> None:
    memory = inputs(shape)
    walk_forward(memory, shape, block_m, block_n)
    out, lse = forward_of(memory, shape)
    assert_close(memory.arrays["o"], out)
    assert_close(memory.arrays["lse"], lse)
    assert_equal(memory, lambda perfect: general_traffic(shape, block_m, block_n, perfect_l2=perfect, lse=True))


@EXAMPLES
@given(SHAPES | MASKED, BLOCK, BLOCK, BLOCK, BLOCK)
def test_the_backward_in_two_kernels(shape: AttentionShape, m: int, n: int, dq_m: int, dq_n: int) -> None:
    memory = with_output(shape)
    walk_delta(memory, shape, sums=False)
    walk_keys(memory, shape, m, n)
    walk_queries(memory, shape, dq_m, dq_n)
    assert_right_gradients(memory, shape)
    assert_equal(
        memory,
        lambda perfect: split_backward_traffic(shape, keys=(m, n), queries=(dq_m, dq_n), perfect_l2=perfect),
    )


@EXAMPLES
@given(SHAPES | MASKED, BLOCK, BLOCK, st.booleans())
def test_the_backward_in_one_kernel(shape: AttentionShape, block_m: int, block_n: int, own_lse: bool) -> None:
    memory = with_output(shape)
    walk_delta(memory, shape, sums=True, own_lse=own_lse)
    walk_keys(memory, shape, block_m, block_n, sums=True)
    walk_finish(memory, shape)
    assert_right_gradients(memory, shape)
    assert_equal(
        memory,
        lambda perfect: fused_backward_traffic(shape, block_m, block_n, perfect_l2=perfect, own_lse=own_lse),
    )


@EXAMPLES
@given(
    st.builds(problem, st.integers(1, 9) | st.just(50), LENGTHS, st.sampled_from(Causal), st.integers(1, 5), WINDOWS),
    BLOCK,
    st.sampled_from([32, 64]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_decoding_with_its_partial_results(shape: AttentionShape, block_m: int, block_n: int, splits: int) -> None:
    config = KernelConfig("flash_decode", block_m, block_n, 4, 2, (("overlap", 0), ("splits", splits)))
    memory, right = inputs(shape), None
    right, _ = forward_of(memory, shape)
    parts = -(-shape.head_dim_v // merge_arguments(config, shape)["BLOCK_D"])
    with np.errstate(invalid="ignore"):  # a row without keys has no weights to merge
        walk_decode(memory, shape, block_m, block_n, splits, parts)
    seen = np.isfinite(forward_of(inputs(shape), shape)[1])
    assert_close(memory.arrays["o"].reshape(right.shape)[seen], right[seen])
    assert_equal(memory, lambda perfect: decode_traffic(shape, config, perfect_l2=perfect))


def blocks_of(shape: AttentionShape, block_q: int, block_k: int, heads: int, batch: int, seed: int) -> Blocks:
    dice = np.random.default_rng(seed)
    sizes = (batch, heads, -(-shape.seqlen_q // block_q), -(-shape.seqlen_k // block_k))
    by_head = tuple(
        tuple(tuple(tuple(map(bool, row)) for row in cells) for cells in entry) for entry in dice.random(sizes) < 0.4
    )
    return Blocks(block_q=block_q, block_k=block_k, by_head=by_head)


def pairs_of(shape: AttentionShape, blocks: Blocks) -> Any:
    """What the mask shows, [batch, heads, seqlen_q, seqlen_k]."""
    heads = [[blocks.of_head(batch, head) for head in range(shape.num_heads)] for batch in range(shape.batch)]
    whole = np.array(heads).repeat(blocks.block_q, 2).repeat(blocks.block_k, 3)
    return whole[:, :, : shape.seqlen_q, : shape.seqlen_k]


MASKS = st.tuples(st.sampled_from([32, 64]), st.sampled_from([32, 64]), st.booleans(), st.booleans(), st.integers(0, 9))


def drawn_blocks(shape: AttentionShape, drawn: tuple[int, int, bool, bool, int]) -> Blocks:
    block_q, block_k, own_heads, own_entries, seed = drawn
    heads, entries = shape.num_heads if own_heads else 1, shape.batch if own_entries else 1
    return blocks_of(shape, block_q, block_k, heads, entries, seed)


@EXAMPLES
@given(SPARSE, MASKS, st.sampled_from([16, 32]), st.sampled_from([16, 32]))
def test_the_block_sparse_forward(shape: AttentionShape, drawn: Any, block_m: int, block_n: int) -> None:
    blocks = drawn_blocks(shape, drawn)
    memory, pairs = inputs(shape), pairs_of(shape, blocks)
    walk_forward(memory, shape, block_m, block_n, clip=False, blocks=pairs)
    # pairs of a tile are all shown or none, so that the walk needs no mask beside the causal one
    assert_close(memory.arrays["o"], forward_of(memory, shape, pairs)[0])
    assert_equal(
        memory,
        lambda perfect: sparse_forward_traffic(shape, block_m, block_n, blocks, perfect_l2=perfect, lse=True),
    )


@EXAMPLES
@given(SPARSE, MASKS, st.sampled_from([16, 32]), st.sampled_from([16, 32]))
def test_the_block_sparse_backward(shape: AttentionShape, drawn: Any, small: int, large: int) -> None:
    blocks = drawn_blocks(shape, drawn)
    pairs = pairs_of(shape, blocks)
    memory = with_output(shape, pairs)
    walk_delta(memory, shape, sums=False)
    walk_queries(memory, shape, small, large, clip=False, blocks=pairs)
    walk_keys(memory, shape, large, small, clip=False, blocks=pairs)
    assert_right_gradients(memory, shape, pairs)
    assert_equal(
        memory,
        lambda perfect: sparse_backward_traffic(
            shape, keys=(large, small), queries=(small, large), blocks=blocks, perfect_l2=perfect
        ),
    )


def test_the_walks_see_a_walk_that_loads_too_little() -> None:
    """The memory is a judge only if a wrong walk is wrong."""
    shape = problem(70, 70, Causal.NONE, 1)
    memory = inputs(shape)
    walk_forward(memory, shape, 32, 32, blocks=np.arange(70)[None, None, None, :] < np.full((2, 2, 70, 1), 64))
    with pytest.raises(AssertionError):
        assert_close(memory.arrays["o"], forward_of(memory, shape)[0])


def test_random_blocks_have_the_density_in_every_row() -> None:
    blocks = random_blocks(problem(2048, 2048, Causal.NONE, 1), density=0.25)
    assert blocks.density == 0.25
    assert {sum(row) for row in blocks.of_head(0, 3)} == {4}
