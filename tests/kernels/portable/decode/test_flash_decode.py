"""Decoding against a float64 reference: in Triton's interpreter on the CPU, compiled where a GPU is."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.decode.kernel import FlashDecode
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.tree_mask import tree_words
from tests.support.triton_modes import DEVICE, ON_GPU, runs

CAN_OVERLAP = ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
# Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

KERNEL = FlashDecode()
HOPPER = limits_for((9, 0))
# Relative Frobenius error against float64; see tests/kernels/portable/forward/test_flash_fwd.py.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-6}
NINE_TOKENS = (None, 0, 1, 1, 2, 2, 3, 3, 4)
"""A with B below; B has C and D; C has E and F; D has G and H; E has I."""
NINE_ROWS = (
    "100000000 110000000 111000000 110100000 111010000 111001000 110100100 110100010 111010001"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem with its tensors. lengths: the keys of every entry."""

    shape: AttentionShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: tuple[int, ...]
    extras: Extras


def shape_of(features: Features | None = None, **changes: Any) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 1, "seqlen_k": 90, "head_dim": 16}
    sizes |= {"dtype": "float16", "features": features or Features()} | changes
    return AttentionShape(**({"head_dim_v": sizes["head_dim"]} | sizes))


def config_of(
    block_m: int = 16, block_n: int = 32, splits: int = 4, warps: int = 4, stages: int = 2, overlap: int = 0
) -> KernelConfig:
    return KernelConfig(KERNEL.name, block_m, block_n, warps, stages, (("splits", splits), ("overlap", overlap)))


def case_of(shape: AttentionShape, lengths: tuple[int, ...] | None = None, **extras: Any) -> Case:
    """Random tensors; what lies behind the keys of an entry is NaN."""
    generator = torch.Generator().manual_seed(0)
    lengths = lengths or (shape.seqlen_k,) * shape.batch

    def draw(heads: int, rows: int, dim: int) -> torch.Tensor:
        tensor = torch.randn(shape.batch, heads, rows, dim, generator=generator)
        return tensor.to(getattr(torch, shape.dtype)).to(DEVICE)

    q = draw(shape.num_heads, shape.seqlen_q, shape.head_dim)
    k = draw(shape.num_heads_kv, shape.seqlen_k, shape.head_dim)
    v = draw(shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v)
    for entry, length in enumerate(lengths):
        k[entry, :, length:] = float("nan")
        v[entry, :, length:] = float("nan")
    if shape.features.cached:
        extras["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return Case(shape=shape, q=q, k=k, v=v, lengths=lengths, extras=Extras(**extras))


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Every entry by the definition, in float64, with its own keys only."""
    shape, features, extras = case.shape, case.shape.features, case.extras
    out = torch.zeros(*case.q.shape[:3], shape.head_dim_v, dtype=torch.float64, device=DEVICE)
    lse = torch.full(case.q.shape[:3], float("-inf"), dtype=torch.float64, device=DEVICE)
    for entry, length in enumerate(case.lengths):
        if not length:
            continue
        k, v = (tensor[entry, :, :length].double() for tensor in (case.k, case.v))
        k, v = (tensor.repeat_interleave(shape.group_size, 0) for tensor in (k, v))
        scores = case.q[entry].double() @ k.transpose(1, 2) * shape.head_dim**-0.5
        diagonal = 0 if shape.causal is Causal.UPPER_LEFT else length - shape.seqlen_q
        distance = (
            torch.arange(shape.seqlen_q, device=DEVICE)[:, None]
            + diagonal
            - torch.arange(length, device=DEVICE)[None, :]
        )
        if features.softcap:
            scores = extras.softcap * torch.tanh(scores / extras.softcap)
        if extras.alibi_slopes is not None:
            scores = scores - extras.alibi_slopes[-1].double()[:, None, None] * distance.abs()
        visible = torch.ones_like(distance, dtype=torch.bool)
        if shape.causal is not Causal.NONE:
            visible &= distance >= 0
        left, right = features.window or (-1, -1)
        visible &= (distance <= left) | (left < 0)
        visible &= (distance >= -right) | (right < 0)
        if extras.tree_mask is not None:
            visible &= tree_sees(extras.tree_mask[entry], shape.seqlen_q, length)
        scores = scores.masked_fill(~visible, float("-inf"))
        lse[entry] = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[entry].nan_to_num(neginf=0.0)[..., None])
        out[entry] = weights @ v
    return out, lse


def tree_sees(words: torch.Tensor, drafts: int, length: int) -> torch.Tensor:
    """[drafts, length], bit by bit."""
    sees = torch.ones(drafts, length, dtype=torch.bool)
    for row in range(drafts):
        for key in range(max(0, length - drafts), length):
            draft = key - (length - drafts)
            sees[row, key] = bool(int(words[row, draft // 32]) >> (draft % 32) & 1)
    return sees.to(words.device)


def paged(case: Case, num_pages: int = 40) -> Case:
    """The same keys in shuffled pages, NaN in all others and behind the keys."""
    shape, size = case.shape, case.shape.features.page_size
    per_entry = -(-shape.seqlen_k // size)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
    table = order[: shape.batch * per_entry].reshape(shape.batch, per_entry).to(torch.int32)

    def pages(tensor: torch.Tensor) -> torch.Tensor:
        result = torch.full((num_pages, tensor.shape[1], size, tensor.shape[3]), float("nan"), dtype=tensor.dtype)
        for entry in range(shape.batch):
            for place, page in enumerate(table[entry].tolist()):
                rows = tensor[entry, :, place * size : (place + 1) * size]
                result[page, :, : rows.shape[1]] = rows
        return result.to(DEVICE)

    k, v = pages(case.k.cpu()), pages(case.v.cpu())
    for entry, length in enumerate(case.lengths):  # nobody reads the numbers of pages that hold no key
        table[entry, -(-length // size) :] = 1 << 30
    extras = Extras(cache_seqlens=case.extras.cache_seqlens, block_table=table.to(DEVICE))
    return Case(shape=shape, q=case.q, k=k, v=v, lengths=case.lengths, extras=extras)


def run(config: KernelConfig, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    assert not KERNEL.violations(config, case.shape, HOPPER)
    out = torch.full_like(case.q[..., :1].expand(*case.q.shape[:3], case.shape.head_dim_v), float("nan"))
    lse = torch.full(case.q.shape[:3], float("nan"), dtype=torch.float32, device=DEVICE)
    launch = KERNEL.bind(config, case.shape)
    scale = case.shape.head_dim**-0.5
    launch(case.q, case.k, case.v, out, lse, scale, *([case.extras] if case.shape.features else []))
    return out, lse


def check(config: KernelConfig, case: Case, reference: Case | None = None) -> None:
    assert_close(run(config, case), expected(reference or case), case.shape.dtype)


def assert_close(
    results: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], dtype: str
) -> None:
    (out, lse), (out_wanted, lse_wanted) = results, wanted
    assert torch.isfinite(out).all()
    assert (out.double() - out_wanted).norm() <= TOLERANCE[dtype] * out_wanted.norm()
    assert torch.equal(lse.isneginf(), lse_wanted.isneginf())
    seen = ~lse_wanted.isneginf()
    assert ((lse.double() - lse_wanted)[seen].abs() <= 1e-4 * (1 + lse_wanted[seen].abs())).all()


@runs
@pytest.mark.few(3)
@pytest.mark.parametrize("splits", KERNEL.parameters["splits"])
def test_every_number_of_splits_and_more_than_tiles(splits: int) -> None:
    check(config_of(splits=splits), case_of(shape_of(seqlen_k=100)))


@runs
@pytest.mark.few(5)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (7, 1), (16, 2), (20, 1)])
def test_groups_of_query_heads(heads: tuple[int, int], splits: int) -> None:
    check(config_of(splits=splits), case_of(shape_of(num_heads=heads[0], num_heads_kv=heads[1])))


@runs
@pytest.mark.few(5)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 32])
def test_few_queries(seqlen_q: int, causal: Causal) -> None:
    check(config_of(splits=2), case_of(shape_of(seqlen_q=seqlen_q, seqlen_k=70, causal=causal)))


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize("block_m", KERNEL.parameters["block_m"])
@pytest.mark.parametrize("block_n", KERNEL.parameters["block_n"])
def test_any_blocks(block_m: int, block_n: int) -> None:
    shape = shape_of(batch=1, num_heads=6, seqlen_q=7, causal=Causal.LOWER_RIGHT)
    check(config_of(block_m, block_n, splits=2), case_of(shape))


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 32), (40, 24), (64, 64)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_head_dimensions_and_types(head_dim: int, head_dim_v: int, dtype: str, splits: int) -> None:
    shape = shape_of(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, seqlen_k=50, batch=1)
    check(config_of(splits=splits), case_of(shape))


@runs
def test_log_sum_exp_is_optional_and_layouts_are_free() -> None:
    case = case_of(shape_of())
    wanted, _ = expected(case)
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (case.q, case.k, case.v))
    for splits in (1, 4):
        out = torch.full_like(q, float("nan"))
        KERNEL.bind(config_of(splits=splits), case.shape)(q, k, v, out, None, 0.25)
        assert (out.double() - wanted).norm() <= TOLERANCE["float16"] * wanted.norm()


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_cache_lengths(splits: int, causal: Causal, seqlen_q: int) -> None:
    """Empty, fuller and full entries, and one with fewer keys than queries; NaN behind all of them."""
    shape = shape_of(Features(cached=True), batch=5, num_heads=2, num_heads_kv=1, seqlen_q=seqlen_q, causal=causal)
    check(config_of(splits=splits), case_of(shape, (0, 90, 33, 2, 64)))


@runs
@pytest.mark.few(7)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("page_size", "block_n"), [(1, 32), (16, 32), (16, 128), (64, 32), (64, 64), (256, 32), (256, 64)]
)
def test_paged_cache(page_size: int, block_n: int, splits: int) -> None:
    shape = shape_of(Features(cached=True, page_size=page_size), batch=3, seqlen_q=2, causal=Causal.LOWER_RIGHT)
    case = case_of(shape, (0, 90, 47))
    check(config_of(splits=splits, block_n=block_n), paged(case, 40 if page_size > 1 else 300), case)


def words_of(trees: list[tuple[int | None, ...]]) -> torch.Tensor:
    return torch.stack([tree_words(parents) for parents in trees]).to(DEVICE)


def random_forest(drafts: int, seed: int) -> tuple[int | None, ...]:
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, max(draft, 1), (), generator=generator)) for draft in range(drafts)]
    return tuple(None if parent < 0 or not draft else parent for draft, parent in enumerate(parents))


@runs
@pytest.mark.parametrize("splits", [1, 4])
def test_tree_of_nine_tokens(splits: int) -> None:
    shape = shape_of(Features(mask=MaskKind.TREE, cached=True), seqlen_q=9, seqlen_k=60)
    check(config_of(splits=splits), case_of(shape, (60, 41), tree_mask=words_of([NINE_TOKENS] * 2)))


@runs
@pytest.mark.few(2)
@pytest.mark.parametrize(("drafts", "lengths"), [(3, (70, 3)), (31, (40, 70)), (33, (33, 64)), (64, (90, 65))])
def test_random_trees(drafts: int, lengths: tuple[int, int]) -> None:
    shape = shape_of(Features(mask=MaskKind.TREE, cached=True), seqlen_q=drafts, num_heads=2)
    trees = [random_forest(drafts, seed) for seed in (1, 2)]
    check(config_of(block_m=32, splits=2), case_of(shape, lengths, tree_mask=words_of(trees)))


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("window", [(20, -1), (0, 0), (-1, 3), (40, 2)])
def test_windows(window: tuple[int, int], causal: Causal) -> None:
    shape = shape_of(Features(window=window, cached=True), seqlen_q=3, causal=causal)
    check(config_of(splits=2), case_of(shape, (90, 34)))


@runs
@pytest.mark.parametrize("apart", [False, True])
def test_soft_cap_and_alibi(apart: bool) -> None:
    slopes = torch.tensor([[0.5, 0.25, 0.125, 0.0625]], device=DEVICE)
    slopes = torch.stack((slopes, -slopes), -1)[..., 0] if apart else slopes
    shape = shape_of(Features(softcap=True, alibi=True), seqlen_q=3, dtype="float32", causal=Causal.LOWER_RIGHT)
    check(config_of(splits=2), case_of(shape, softcap=1.5, alibi_slopes=slopes))


GPU_HEADS = [(32, 8), (8, 8), (28, 4), (16, 1)]


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", GPU_HEADS)
@pytest.mark.parametrize(("block_m", "block_n", "warps", "stages"), [(16, 64, 4, 3), (32, 128, 8, 2), (64, 32, 4, 1)])
def test_real_sizes(dtype: str, heads: tuple[int, int], block_m: int, block_n: int, warps: int, stages: int) -> None:
    sizes = {"num_heads": heads[0], "num_heads_kv": heads[1], "head_dim": 128, "dtype": dtype}
    for seqlen_q, splits in ((1, 1), (1, 64), (4, 8), (32, 128)):
        shape = shape_of(Features(cached=True), seqlen_q=seqlen_q, seqlen_k=5000, causal=Causal.LOWER_RIGHT, **sizes)
        check(config_of(block_m, block_n, splits, warps, stages), case_of(shape, (5000, 1234)))


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(("block_n", "stages"), [(32, 4), (64, 3), (128, 2)])
def test_real_pages(dtype: str, page_size: int, block_n: int, stages: int) -> None:
    sizes = {"num_heads": 32, "num_heads_kv": 8, "head_dim": 128, "seqlen_k": 3000, "dtype": dtype}
    case = case_of(shape_of(Features(cached=True, page_size=page_size), **sizes), (2999, 0))
    check(config_of(block_n=block_n, splits=16, stages=stages), paged(case, 400), case)


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("drafts", [9, 33, 64])
def test_real_trees(drafts: int) -> None:
    sizes = {"num_heads": 32, "num_heads_kv": 8, "head_dim": 128, "seqlen_k": 3000, "dtype": "bfloat16"}
    shape = shape_of(Features(mask=MaskKind.TREE, cached=True), seqlen_q=drafts, **sizes)
    words = words_of([random_forest(drafts, seed) for seed in (3, 4)])
    check(config_of(64, 64, 8, 4, 3), case_of(shape, (3000, 100), tree_mask=words))


overlaps = pytest.mark.parametrize(
    "overlap", [0, pytest.param(1, marks=pytest.mark.skipif(not CAN_OVERLAP, reason="the GPU has no such launches"))]
)


@pytest.mark.gpu
@runs
@overlaps
def test_the_merge_sees_all_that_the_splits_wrote(overlap: int) -> None:
    """Many calls in a row, whose workspaces are the same memory; each must give its own keys' output."""
    sizes = {"num_heads": 32, "num_heads_kv": 8, "head_dim": 128, "seqlen_k": 8192, "dtype": "bfloat16", "batch": 1}
    case = case_of(shape_of(**sizes))
    launch = KERNEL.bind(config_of(block_n=64, splits=64, overlap=overlap), case.shape)
    outs = [torch.full_like(case.q, float("nan")) for _ in range(100)]
    queries = [case.q * (1 + call / 50) for call in range(100)]
    for q, out in zip(queries, outs, strict=True):
        launch(q, case.k, case.v, out, None, 0.1)
    one_split = KERNEL.bind(config_of(block_n=64, splits=1), case.shape)
    for q, out in zip(queries, outs, strict=True):
        wanted = torch.empty_like(q)
        one_split(q, case.k, case.v, wanted, None, 0.1)
        assert (out.double() - wanted.double()).norm() <= 2 * TOLERANCE["bfloat16"] * wanted.double().norm()


@pytest.mark.gpu
@runs
@pytest.mark.parametrize(("splits", "overlap"), [(1, 0), (8, 0), (8, 1)])
def test_short_launches_compute_the_same(splits: int, overlap: int) -> None:
    if overlap and not CAN_OVERLAP:
        pytest.skip("the GPU has no such launches")
    case = case_of(shape_of(head_dim=64, seqlen_k=2000, dtype="bfloat16"))
    launch = KERNEL.bind(config_of(splits=splits, overlap=overlap), case.shape)
    out = torch.full_like(case.q, float("nan"))
    short = launch.pinned(case.q, case.k, case.v, out, None, 0.125)
    assert short is not launch
    out.fill_(float("nan"))
    short(case.q, case.k, case.v, out, None, 0.125)
    wanted, _ = expected(case)
    assert (out.double() - wanted).norm() <= TOLERANCE["bfloat16"] * wanted.norm()


@pytest.mark.gpu
@runs
@overlaps
def test_captured_in_a_graph(overlap: int) -> None:
    case = case_of(shape_of(head_dim=64, seqlen_k=2000, dtype="bfloat16"))
    out, launch = torch.empty_like(case.q), KERNEL.bind(config_of(splits=16, overlap=overlap), case.shape)
    launch(case.q, case.k, case.v, out, None, 0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(case.q, case.k, case.v, out, None, 0.125)
    out.fill_(float("nan"))
    graph.replay()
    wanted, _ = expected(case)
    assert (out.double() - wanted).norm() <= TOLERANCE["bfloat16"] * wanted.norm()
