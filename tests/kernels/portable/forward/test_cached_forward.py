"""The general forward over caches and their pages, against the float64 reference."""

from dataclasses import replace

import pytest
import torch

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import Causal
from tests.kernels.portable.forward.test_flash_fwd_general import CONFIG, KERNEL, check, run
from tests.support.attention.feature_cases import cached, shape_of
from tests.support.triton_modes import runs

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

PAGES = (1, 8, 16, 32, 64, 256)
OTHERS = ("window=20:9", "softcap", "alibi", "boolean", "additive dropout", "window=0:0 alibi")
LENGTHS_Q, LENGTHS_K = (5, 70, 0, 33, 8), (90, 70, 7, 0, 200)


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("page", [0, *PAGES])
@pytest.mark.parametrize("heads_first", [False, True])
def test_entries_of_their_own_lengths(page: int, causal: Causal, heads_first: bool) -> None:
    """Longer and shorter than the queries, none at all, and ends on and off the edges of pages and tiles."""
    features = f"cached page={page}" if page else "cached"
    shape = shape_of(features, batch=5, seqlen_k=200, causal=causal)
    lse = check(shape, *cached(shape, None, (200, 64, 0, 65, 33), heads_first=heads_first))
    assert lse[2].isneginf().all()


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("page", [0, *PAGES])
def test_packed_queries(page: int, causal: Causal) -> None:
    features = f"varlen cached page={page}" if page else "varlen cached"
    shape = shape_of(features, batch=5, seqlen_k=200, causal=causal)
    lse = check(shape, *cached(shape, LENGTHS_Q, LENGTHS_K))
    assert lse[:, 75:108].isneginf().all()  # queries of an entry without keys


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize(
    "others", ["window=20:9", "softcap", "alibi", "boolean", "additive dropout", "window=0:0 alibi"]
)
@pytest.mark.parametrize("kind", ["cached", "cached page=16", "varlen cached page=64"])
def test_other_features(kind: str, others: str) -> None:
    shape = shape_of(f"{kind} {others}", batch=5, seqlen_k=200, causal=Causal.LOWER_RIGHT, num_heads=4, num_heads_kv=2)
    check(shape, *cached(shape, LENGTHS_Q if shape.features.varlen else None, LENGTHS_K))


@runs
@pytest.mark.few(4)
@pytest.mark.parametrize(("block_m", "block_n"), [(64, 128), (128, 32), (32, 64)])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_pages_and_blocks_of_any_size(page: int, block_m: int, block_n: int) -> None:
    shape = shape_of(f"cached page={page}", batch=2, seqlen_k=300, head_dim=24, head_dim_v=40, dtype="float16")
    check(shape, *cached(shape, None, (300, 129)), replace(CONFIG, block_m=block_m, block_n=block_n))


@runs
def test_pages_give_what_contiguous_keys_give() -> None:
    shape = shape_of("varlen cached page=16", batch=2, seqlen_k=128, causal=Causal.LOWER_RIGHT)
    (q, k, v), extras = cached(shape, (30, 70), (128, 70))
    found = run(shape, (q, k, v), extras)
    assert extras.block_table is not None
    pages = extras.block_table.long() % k.shape[0]
    keys, values = (cache[pages].transpose(1, 2).flatten(2, 3) for cache in (k, v))
    whole = shape_of("varlen cached", batch=2, seqlen_k=128, causal=Causal.LOWER_RIGHT)
    expected = run(whole, (q, keys, values), replace(extras, block_table=None))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page", [0, 16, 128, 256])
@pytest.mark.parametrize("kind", ["cached", "varlen cached", "varlen cached window=300:0 softcap"])
def test_real_sizes(kind: str, page: int, head_dim: int) -> None:
    features = f"{kind} page={page}" if page else kind
    sizes = {"batch": 4, "num_heads": 8, "num_heads_kv": 2, "seqlen_q": 500, "seqlen_k": 3000, "dtype": "bfloat16"}
    shape = shape_of(features, **sizes, head_dim=head_dim, causal=Causal.LOWER_RIGHT)
    qkv, extras = cached(shape, (500, 1, 64, 333) if shape.features.varlen else None, (3000, 999, 64, 2048))
    for blocks in ((128, 64, 8, 3), (64, 128, 4, 2)):
        check(shape, qkv, extras, KernelConfig(KERNEL.name, *blocks))
