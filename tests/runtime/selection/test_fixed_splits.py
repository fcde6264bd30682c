"""A number of splits that the caller fixes: nothing but the entries' own sizes decides how a row is computed."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.forward.kernel import options_of
from blocktune.kernels.portable.decode.launch import decode_launch, merge_arguments
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
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
    lengths = (512, 2048, 8192, 100001, 131072)
    found = {tuple(fixed_splits(replace(shape, seqlen_k=keys), 8, limits_for((9, 0)))) for keys in lengths}
    assert len(found) == 1
    assert len({KERNEL.default_config(replace(shape, seqlen_k=keys), limits_for((9, 0))) for keys in lengths}) > 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(1023, -1), (127, -1)])
def test_a_window_that_no_key_is_outside_of_changes_nothing(window: tuple[int, int], head_dim: int) -> None:
    """It is no part of the call where the cache is short."""
    plain = replace(SHAPE, head_dim=head_dim, head_dim_v=head_dim)
    windowed = replace(plain, features=replace(plain.features, window=window))
    assert [*fixed_splits(plain, 8, limits_for((9, 0)))] == [*fixed_splits(windowed, 8, limits_for((9, 0)))]
    configs = [KERNEL.default_config(shape, limits_for((9, 0))) for shape in (plain, windowed)]
    assert head_dim == 256 or configs[0] != configs[1]


PACKED = replace(SHAPE, causal=Causal.LOWER_RIGHT, features=Features(cached=True, varlen=True, page_size=16))
SIZES = [*itertools.product(BATCHES, (2, 16, 512, 4096, 32768), (512, 8192, 100001, 131072))]
"""Batches, queries and keys."""


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("own", [{}, {"softcap": True}, {"page_size": 0}])
def test_one_launch_serves_every_batch_of_packed_sequences(own: dict[str, Any], head_dim: int) -> None:
    """On Hopper by its own kernel, whose constants are the same as well."""
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "features": replace(PACKED.features, **own)}
    shapes = [replace(PACKED, batch=b, seqlen_q=q, seqlen_k=max(q, k), **sizes) for b, q, k in SIZES]
    for cc, best in (((9, 0), "flash_fwd_hopper"), ((8, 0), "flash_fwd_general")):
        (steps,) = {tuple(fixed_splits(shape, 1, limits_for(cc))) for shape in shapes}
        first = next(step for step in steps if isinstance(step, Candidate))
        assert first.config.kernel == best
        if best == "flash_fwd_hopper":
            assert len({options_of(first.config, shape) for shape in shapes}) == 1


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
