"""A number of splits that the caller fixes: nothing but the entries' own sizes decides how a row is computed."""

from dataclasses import replace

import pytest

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.decode.launch import decode_launch, merge_arguments
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.fallback import fixed_splits
from blocktune.runtime.selection.ladder import Candidate, Rejection

pytestmark = pytest.mark.triton_free

SHAPE = AttentionShape(
    batch=1,
    num_heads=32,
    num_heads_kv=8,
    seqlen_q=1,
    seqlen_k=8192,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
    features=Features(cached=True),
)
BATCHES = (1, 2, 17, 300)
KERNEL = get_kernel("flash_decode")


@pytest.mark.parametrize("queries", [1, 4, 100])
@pytest.mark.parametrize("splits", [1, 2, 64, 128])
@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_one_config_serves_every_batch(cc: tuple[int, int], splits: int, queries: int) -> None:
    shape = replace(SHAPE, seqlen_q=queries)
    found = [tuple(fixed_splits(replace(shape, batch=batch), splits, limits_for(cc))) for batch in BATCHES]
    assert len(set(found)) == 1
    (candidate,) = found[0]
    assert isinstance(candidate, Candidate)
    assert candidate.config.parameters["splits"] == splits


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page", [0, 64])
def test_one_config_serves_every_length_of_the_cache(page: int, head_dim: int) -> None:
    """It is as long as the longest entry of the batch needs."""
    shape = replace(SHAPE, head_dim=head_dim, head_dim_v=head_dim, features=Features(cached=True, page_size=page))
    lengths = (512, 2048, 8192, 131072)
    found = {tuple(fixed_splits(replace(shape, seqlen_k=keys), 8, limits_for((9, 0)))) for keys in lengths}
    assert len(found) == 1
    assert len({KERNEL.default_config(replace(shape, seqlen_k=keys), limits_for((9, 0))) for keys in lengths}) > 1


def test_the_default_itself_hangs_on_the_batch() -> None:
    """Else there would be nothing to fix."""
    wide = replace(SHAPE, batch=300)
    (candidate,) = fixed_splits(SHAPE, 8, limits_for((9, 0)))
    assert isinstance(candidate, Candidate)
    parts = [merge_arguments(candidate.config, shape)["BLOCK_D"] for shape in (SHAPE, wide)]
    assert parts == [32, 128]


def test_the_merge_adds_up_in_one_order_whatever_the_batch() -> None:
    (candidate,) = fixed_splits(SHAPE, 64, limits_for((9, 0)))
    assert isinstance(candidate, Candidate)
    shapes = [replace(SHAPE, batch=batch) for batch in BATCHES]
    merges = [decode_launch(candidate.config, shape, batch_invariant=True).merge for shape in shapes]
    assert len({str(merge.options) for merge in merges if merge is not None}) == 1
    found = [merge_arguments(candidate.config, shape, batch_invariant=True) for shape in shapes]
    assert len({(each["SPLITS"], each["BLOCK_D"], each["OVERLAP"]) for each in found}) == 1


def test_what_the_kernel_does_not_know_is_rejected() -> None:
    (rejection,) = fixed_splits(replace(SHAPE, features=Features(cached=True, dropout=True)), 4, limits_for((9, 0)))
    assert isinstance(rejection, Rejection)
    assert "dropout" in rejection.reason
