"""The Hopper forward over caches and their pages: its source on the CPU, by tests/support/gluon/machine.py."""

from dataclasses import replace

import pytest
import torch

from blocktune.kernels.hopper.forward import launch as forward_launch
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.attention import feature_cases
from tests.support.attention.feature_cases import cached
from tests.support.gluon.hopper_forward import SINKS, compare, config_of, run, shape_of

pytestmark = pytest.mark.triton_free

PAGES = (8, 16, 32, 64, 128, 256)
LENGTHS_Q, LENGTHS_K = (100, 0, 257, 64, 1), (130, 200, 300, 64, 0)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_launch, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(feature_cases, "DEVICE", "cpu")


def check(problem: AttentionShape, qkv: list[torch.Tensor], extras: Extras, config: KernelConfig | None = None) -> None:
    extras = replace(extras, softcap=1.5 if problem.features.softcap else 0.0)
    out, lse = run(problem, config or config_of(problem), list(qkv), extras, 2)
    options = {"causal": problem.causal, "features": problem.features, "dtype": torch.float64}
    expected = attention_reference(*qkv, **options, extras=extras)
    compare(out, lse, *(expected if extras.sinks is None else with_sinks(*expected, extras.sinks)))


@pytest.mark.few(8)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("page", [0, *PAGES])
@pytest.mark.parametrize("heads_first", [False, True])
def test_entries_of_their_own_lengths(page: int, causal: Causal, heads_first: bool) -> None:
    """Longer and shorter than the queries, none at all, and ends on and off the edges of pages and tiles."""
    features = f"cached page={page}" if page else "cached"
    problem = shape_of(100, 300, features=features, batch=5, causal=causal)
    check(problem, *cached(problem, None, (300, 64, 0, 129, 33), heads_first=heads_first))


@pytest.mark.few(8)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("page", [0, *PAGES])
@pytest.mark.parametrize("sunk", [False, True])
def test_packed_queries(page: int, causal: Causal, sunk: bool) -> None:
    features = f"varlen cached page={page}" if page else "varlen cached"
    problem = shape_of(257, 300, features=features, batch=5, causal=causal)
    qkv, extras = cached(problem, LENGTHS_Q, LENGTHS_K)
    check(problem, qkv, replace(extras, sinks=torch.tensor(SINKS["usual"]) if sunk else None))


@pytest.mark.few(8)
@pytest.mark.parametrize("others", ["window=70:20", "window=40:0", "softcap", "alibi", "dropout", "softcap window=9:9"])
@pytest.mark.parametrize("kind", ["cached", "cached page=16", "varlen cached page=128"])
def test_other_features(kind: str, others: str) -> None:
    problem = shape_of(257, 300, features=f"{kind} {others}", batch=5, causal=Causal.LOWER_RIGHT)
    check(problem, *cached(problem, LENGTHS_Q if problem.features.varlen else None, LENGTHS_K))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(24, 24), (40, 72), (64, 128), (80, 96), (96, 96), (128, 64), (128, 128), (192, 128), (192, 192), (256, 256)],
)
@pytest.mark.parametrize("page", [16, 64, 128])
def test_head_dimensions(page: int, head_dim: int, head_dim_v: int) -> None:
    features = f"varlen cached page={page}"
    problem = shape_of(257, 300, head_dim, features, head_dim_v=head_dim_v, batch=5, causal=Causal.LOWER_RIGHT)
    check(problem, *cached(problem, LENGTHS_Q, LENGTHS_K))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("block_m", "block_n", "num_stages", "split_release"),
    [(128, 64, 4, 0), (128, 128, 2, 1), (192, 64, 3, 0), (192, 128, 2, 1), (256, 64, 2, 0), (128, 128, 3, 2)],
)
@pytest.mark.parametrize("page", [8, 32, 64, 256])
def test_parameters(page: int, block_m: int, block_n: int, num_stages: int, split_release: int) -> None:
    problem = shape_of(257, 300, 64, f"varlen cached page={page} window=90:20", batch=5)
    own = {"block_m": block_m, "block_n": block_n, "num_stages": num_stages, "split_release": split_release}
    config = config_of(problem, **own, early_p=1, keep_p=1, q_registers=0)
    check(problem, *cached(problem, LENGTHS_Q, LENGTHS_K), config)


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 2)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    sizes = {"batch": 5, "num_heads": heads[0], "num_heads_kv": heads[1]}
    problem = shape_of(100, 300, features="cached page=64", causal=Causal.LOWER_RIGHT, **sizes)
    check(problem, *cached(problem, None, LENGTHS_K))


def test_caches_with_keys_and_values_beside_each_other() -> None:
    """Pages [pages, 2, page_size, heads, dim] and [pages, page_size, heads, 2 dim], as engines have them."""
    problem = shape_of(100, 300, features="cached page=16", batch=5, causal=Causal.LOWER_RIGHT)
    (q, k, v), extras = cached(problem, None, LENGTHS_K)
    both = torch.stack((k, v), 1)
    check(problem, [q, both[:, 0], both[:, 1]], extras)
    both = torch.cat((k.transpose(1, 2), v.transpose(1, 2)), -1).transpose(1, 2)
    check(problem, [q, both[..., :64], both[..., 64:]], extras)
