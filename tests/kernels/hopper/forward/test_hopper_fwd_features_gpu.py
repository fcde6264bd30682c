"""Results of the Hopper forward with ALiBi, masks and dropout on a GPU."""

import itertools
from typing import Any

import pytest
import torch

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.kernels.hopper.forward.test_flash_fwd_hopper_gpu import (
    HOPPER,
    KERNEL,
    compare,
    results,
    run,
    shape_of,
    tensors,
)
from tests.support.attention.feature_cases import cached
from tests.support.hopper_gpu import skip_elsewhere

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

WORDS = ("alibi", "boolean", "additive", "dropout")
COMBINATIONS = ("alibi boolean window=200:30", "alibi additive dropout softcap", "boolean dropout")


@pytest.fixture(autouse=True)
def _hopper_alone() -> None:
    skip_elsewhere(KERNEL)


def extras_of(problem: AttentionShape, sizes: tuple[int, int, int] | None = None, **changes: Any) -> Extras:
    """Random extras. The masks hide a fifth of the pairs, of every third row all, and the first key always."""
    features = problem.features
    batch, heads, queries = sizes or (1, 1, problem.seqlen_q)
    seen = torch.rand(batch, heads, queries, problem.seqlen_k, device="cuda") > 0.2
    seen[:, :, 1::3], seen[..., 0] = False, False
    bias = torch.randn(seen.shape, device="cuda").to(getattr(torch, problem.dtype)).masked_fill(~seen, float("-inf"))
    slopes = torch.rand(problem.batch, problem.num_heads, device="cuda") / 4
    given: dict[str, Any] = {"softcap": 1.5 if features.softcap else 0.0}
    given |= {"mask": {MaskKind.BOOLEAN: seen, MaskKind.ADDITIVE: bias}.get(features.mask)}
    given |= {"alibi_slopes": slopes if features.alibi else None}
    given |= {"dropout_p": 0.3, "seed": 0xDEADBEEF_87654321, "offset": 5} if features.dropout else {}
    return Extras(**given | changes)


def check(
    problem: AttentionShape,
    extras: Extras | None = None,
    config: KernelConfig | None = None,
    tokens: tuple[int, int] | None = None,
    layout: str = "bhsd",
) -> None:
    """Twice the same, to the bit, and right."""
    qkv, extras = tensors(problem, layout, tokens), extras or extras_of(problem)
    found, again = (run(problem, qkv, extras, config) for _ in range(2))
    options: dict[str, Any] = {"causal": problem.causal, "features": problem.features, "extras": extras}
    compare(problem, found, attention_reference(*qkv, **options, dtype=torch.float64))
    assert torch.equal(found[0], again[0])
    assert torch.equal(found[1], again[1])


@pytest.mark.parametrize("features", [*WORDS, *COMBINATIONS])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_and_causal_masks(head_dim: int, features: str) -> None:
    for causal, lengths in itertools.product(Causal, ((1000, 1000), (300, 1300), (1301, 299), (64, 64), (1, 77))):
        check(shape_of(*lengths, head_dim, features, causal=causal), layout="bshd")


@pytest.mark.parametrize("features", ["alibi", "alibi dropout"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_walks_that_begin_at_the_diagonal(head_dim: int, features: str) -> None:
    for seqlen_q, seqlen_k in ((1024, 1024), (512, 1536), (1536, 512), (1000, 1024)):
        check(shape_of(seqlen_q, seqlen_k, head_dim, features))


@pytest.mark.parametrize("slopes", [(0.0, 1e-4, 0.5, 1.0), (8.0, -0.2, 2.0**-9, 1 / 3)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_slopes_of_all_sizes(head_dim: int, slopes: tuple[float, ...]) -> None:
    """Rows see one key alone, or nearly all alike; a slope below zero raises the maximum in every block."""
    given = Extras(alibi_slopes=torch.tensor([slopes] * 2, device="cuda"))
    for causal, lengths in itertools.product(Causal, ((1024, 1024), (700, 1300))):
        check(shape_of(*lengths, head_dim, "alibi", causal=causal), given)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_begin_with_a_mask(head_dim: int) -> None:
    """With queries in registers; the scale of 64 columns is a power of two, that of 128 is none."""
    names = {"block_m": 128, "block_n": 64, "num_warps": 4, "num_stages": 3}
    own = {"split_release": 0, "early_p": 1, "keep_p": 1, "output_panels": 0, "q_registers": head_dim}
    config = KernelConfig.of(KERNEL.name, names | own)
    for causal, lengths in itertools.product(Causal, ((1000, 1000), (300, 1300), (1, 77))):
        for dtype in ("bfloat16", "float16"):
            check(shape_of(*lengths, head_dim, "additive", causal=causal, dtype=dtype), config=config)


@pytest.mark.parametrize("features", WORDS)
@pytest.mark.parametrize("head_dim", [40, 96, 192, 256])
def test_head_dimensions(head_dim: int, features: str) -> None:
    for causal in Causal:
        check(shape_of(500, 700, head_dim, features, causal=causal))
    check(shape_of(500, 700, head_dim, features, dtype="float16"))


@pytest.mark.parametrize("features", ["boolean", "additive"])
def test_masks_that_heads_entries_or_queries_share(features: str) -> None:
    for sizes in itertools.product((1, 2), (1, 4), (1, 700)):
        problem = shape_of(700, 900, 128, features)
        check(problem, extras_of(problem, sizes))
        strided = torch.randn(900, *sizes, device="cuda").permute(1, 2, 3, 0)
        mask = strided > 0 if features == "boolean" else strided
        check(problem, Extras(mask=mask))


@pytest.mark.parametrize("hidden", [-1e4, -1e9, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_additive_masks_that_hide_with_finite_numbers(hidden: float, head_dim: int) -> None:
    problem = shape_of(100, 1300, head_dim, features="additive")
    mask = torch.zeros(1, 1, 100, 1300, device="cuda")
    mask[..., :650], mask[:, :, ::2, 500:], mask[:, :, ::7] = hidden, hidden, hidden
    q, k, v = tensors(problem)
    found, _ = run(problem, [q, k, v], Extras(mask=mask))
    k, v = (tensor.double().repeat_interleave(2, 1) for tensor in (k, v))
    scores = (q.double() @ k.mT * problem.head_dim**-0.5).float() + mask
    right = scores.double().softmax(-1) @ v
    assert (found.double() - right).norm() <= 6e-3 * right.norm()


SEQUENCES = [((100, 0, 257, 2000, 64, 1), (30, 200, 129, 1999, 64, 0)), ((64, 64, 1500), (0, 128, 1500))]


@pytest.mark.parametrize("features", ["alibi", "boolean", "dropout", "alibi additive dropout window=170:20"])
def test_packed_sequences(features: str) -> None:
    for (lengths_q, lengths_k), causal in itertools.product(SEQUENCES, Causal):
        sizes = {"seqlen_q": max(lengths_q), "seqlen_k": max(lengths_k), "batch": len(lengths_q)}
        problem = shape_of(**sizes, head_dim=128, features=f"varlen {features}", causal=causal)
        bounds = ([0, *itertools.accumulate(lengths)] for lengths in (lengths_q, lengths_k))
        cu_q, cu_k = (torch.tensor(bound, dtype=torch.int32, device="cuda") for bound in bounds)
        tokens = sum(lengths_q), sum(lengths_k)
        check(problem, extras_of(problem, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), tokens=tokens, layout="bshd")


@pytest.mark.parametrize("features", [*WORDS, "alibi additive dropout"])
@pytest.mark.parametrize(("block_m", "block_n"), [*itertools.product((128, 192), (64, 128)), (256, 64)])
def test_every_block(block_m: int, block_n: int, features: str) -> None:
    names = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": 2}
    own = {"split_release": 1, "early_p": 1, "keep_p": 0, "output_panels": 0, "q_registers": 0}
    config = KernelConfig.of(KERNEL.name, names | own)
    for problem in (shape_of(900, 900, 64, features), shape_of(700, 700, features=features, causal=Causal.UPPER_LEFT)):
        assert not KERNEL.violations(config, problem, HOPPER)
        check(problem, config=config)


@pytest.mark.parametrize("features", WORDS)
def test_the_short_launch_gives_the_same(features: str) -> None:
    problem = shape_of(1000, 1300, 128, features, causal=Causal.LOWER_RIGHT)
    launch: Any = KERNEL.bind(KERNEL.default_config(problem, HOPPER), problem)
    qkv, scale = tensors(problem), problem.head_dim**-0.5
    short = launch.pinned(*qkv, *results(problem, qkv[0]), scale, extras_of(problem))
    for _ in range(3):
        qkv, extras = [tensor + 1 for tensor in qkv], extras_of(problem)
        out, lse = results(problem, qkv[0])
        short(*qkv, out, lse, scale, extras)
        expected = run(problem, qkv, extras)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


PAGES = (0, 8, 16, 32, 64, 128, 256)
LENGTHS_Q, LENGTHS_K = (300, 0, 700, 64, 1), (1000, 200, 700, 64, 0)


def check_cache(problem: AttentionShape, config: KernelConfig | None = None) -> None:
    """Twice the same, to the bit, and right, over a cache whose entries have lengths of their own."""
    qkv, extras = cached(problem, LENGTHS_Q if problem.features.varlen else None, LENGTHS_K)
    assert KERNEL.cache_problem(*qkv[1:]) is None
    found, again = (run(problem, qkv, extras, config) for _ in range(2))
    options: dict[str, Any] = {"causal": problem.causal, "features": problem.features, "extras": extras}
    compare(problem, found, attention_reference(*qkv, **options, dtype=torch.float64))
    assert torch.equal(found[0], again[0])
    assert torch.equal(found[1], again[1])


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", ["cached", "varlen cached", "varlen cached window=200:0", "cached softcap"])
def test_caches(kind: str, page: int) -> None:
    features = f"{kind} page={page}" if page else kind
    for head_dim, causal in itertools.product((64, 96, 128, 256), Causal):
        check_cache(shape_of(700, 1000, head_dim, features, batch=5, causal=causal))


@pytest.mark.parametrize("page", [0, 16, 128])
@pytest.mark.parametrize(("block_m", "block_n"), [*itertools.product((128, 192), (64, 128)), (256, 64)])
def test_every_block_over_pages(block_m: int, block_n: int, page: int) -> None:
    names = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": 2}
    for split_release, window in itertools.product((0, 1), ("", "window=90:20")):
        own = {"split_release": split_release, "early_p": 1, "keep_p": 0, "output_panels": 0, "q_registers": 0}
        features = f"varlen cached {window} " + (f"page={page}" if page else "")
        check_cache(shape_of(700, 1000, 64, features, batch=5), KernelConfig.of(KERNEL.name, names | own))


def test_packed_sequences_whose_tiles_hide_many_blocks_on_the_left() -> None:
    """The last rows of a tile see as few of its first blocks as there are slots: the producer waits for these rows."""
    names = {"block_m": 256, "block_n": 64, "num_warps": 4, "num_stages": 3}
    own = {"split_release": 0, "early_p": 1, "keep_p": 0, "output_panels": 0, "q_registers": 0}
    problem = shape_of(3000, 3000, 64, "varlen window=1100:0", batch=2, causal=Causal.LOWER_RIGHT)
    bounds = torch.tensor([0, 3000, 3000], dtype=torch.int32, device="cuda")
    extras = Extras(cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    check(problem, extras, KernelConfig.of(KERNEL.name, names | own), (3000, 3000), "bshd")
