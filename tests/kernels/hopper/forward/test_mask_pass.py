"""The pass that lays masks out for the Hopper forward, in Triton's interpreter or on a GPU."""

import pytest
import torch

from blocktune.kernels.base.feature_arguments import mask_bytes
from blocktune.kernels.hopper.backward.layout import mask_bounds
from blocktune.kernels.hopper.biases.arguments import MaskPass, seen_by_keys, turned
from blocktune.kernels.hopper.biases.mask_pass import KEYS, ROWS, Bounds, LaidMask, lay_out_mask_kernel
from blocktune.kernels.hopper.forward.launch import seen_bounds
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.attention.laid_masks import laid_out
from tests.support.triton_modes import DEVICE, runs

pytestmark = pytest.mark.interpreted
UNWRITTEN = 77
SIZES = [(1, 1, 1, 300), (2, 1, 64, 128), (1, 2, 100, 129), (2, 2, 65, 40)]


def written(mask: torch.Tensor, bounds: Bounds = (None, None)) -> tuple[LaidMask, torch.Tensor]:
    laid = LaidMask.of(mask)
    dtype = torch.int32 if laid.boolean else mask.dtype
    memory = torch.full((laid.programs * laid.tile,), UNWRITTEN, dtype=dtype, device=mask.device)
    lay_out_mask_kernel[(laid.programs,)](mask_bytes(mask), memory, *laid.arguments(mask, bounds))
    return laid, memory.cpu()


def drawn(kind: str, sizes: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.randn(sizes, generator=torch.Generator().manual_seed(2))
    return (numbers > 0 if kind == "bool" else numbers.to(getattr(torch, kind))).to(DEVICE)


@runs
@pytest.mark.parametrize("kind", ["bool", "float16", "float32"])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_pair_is_where_its_thread_looks(sizes: tuple[int, int, int, int], kind: str) -> None:
    mask = drawn(kind, sizes)
    laid, found = written(mask)
    assert torch.equal(found, laid_out(mask.cpu()))
    steps = laid.tiles_k * laid.tiles_q * laid.heads, laid.tiles_k * laid.tiles_q, laid.tiles_k
    own = tuple(0 if size == 1 else step for size, step in zip(sizes[:3], steps, strict=True))
    assert laid.strides(mask) == own


@runs
@pytest.mark.parametrize("kind", ["bool", "bfloat16"])
def test_masks_of_any_strides(kind: str) -> None:
    mask = drawn(kind, (300, 2, 1, 70)).permute(1, 2, 3, 0)
    assert torch.equal(written(mask)[1], laid_out(mask.cpu()))


@runs
def test_an_expanded_mask_is_laid_out_once() -> None:
    mask = drawn("bool", (1, 1, 1, 200))
    expanded = mask.expand(3, 2, 500, 200)
    laid, found = written(expanded)
    assert (laid.batch, laid.heads, laid.tiles_q) == (1, 1, 1)
    assert laid.strides(expanded) == (0, 0, 0)
    assert torch.equal(found, laid_out(mask.cpu()))


def check_seen(laid: LaidMask, found: torch.Tensor, expected: torch.Tensor, seen: torch.Tensor) -> None:
    """Tiles with a pair that is seen [rows, columns] are laid out, and no others."""
    of_tile = seen.view(laid.tiles_q, ROWS, laid.tiles_k, KEYS).any(3).any(1)
    sizes = -1, laid.tiles_q, laid.tiles_k, laid.tile
    assert torch.equal(found.view(sizes)[:, of_tile], expected.view(sizes)[:, of_tile])
    assert (found.view(sizes)[:, ~of_tile] == UNWRITTEN).all()


@runs
@pytest.mark.parametrize("kind", ["bool", "float16"])
@pytest.mark.parametrize("bounds", [(0, None), (-70, None), (31, -100), (None, 65), (-300, None)])
def test_tiles_without_a_pair_that_sees_another_are_left_out(bounds: Bounds, kind: str) -> None:
    mask = drawn(kind, (1, 2, 200, 500))
    laid, found = written(mask, bounds)
    right, left = (500 if bounds[0] is None else bounds[0]), (-200 if bounds[1] is None else bounds[1])
    apart = torch.arange(laid.tiles_k * KEYS) - torch.arange(laid.tiles_q * ROWS)[:, None]
    check_seen(laid, found, laid_out(mask.cpu()), (apart <= right) & (apart >= left))


@runs
@pytest.mark.parametrize("bounds", [(0, None), (-70, None), (31, -100), (None, 65), (-300, None)])
def test_with_keys_as_rows_the_same_pairs_count(bounds: Bounds) -> None:
    mask = drawn("float16", (1, 2, 500, 200))
    laid, found = written(turned(mask), seen_by_keys(bounds))
    upper, lower = (200 if bounds[0] is None else bounds[0]), (-500 if bounds[1] is None else bounds[1])
    apart = torch.arange(laid.tiles_q * ROWS)[:, None] - torch.arange(laid.tiles_k * KEYS)
    check_seen(laid, found, laid_out(mask.mT.cpu()), (apart <= upper) & (apart >= lower))


@runs
def test_a_row_that_all_queries_share_is_laid_out_whole() -> None:
    mask = drawn("bool", (1, 1, 1, 300)).expand(1, 1, 400, 300)
    assert torch.equal(written(mask, (0, None))[1], laid_out(mask[:, :, :1].cpu()))


@runs
@pytest.mark.parametrize("kind", ["bool", "bfloat16"])
def test_a_mask_with_keys_as_rows(kind: str) -> None:
    mask = drawn(kind, (2, 1, 100, 150))
    assert torch.equal(written(turned(mask))[1], laid_out(mask.mT.cpu()))
    assert MaskPass.of(mask, (None, None), pins=False).place == (3, 0, 1, 1)


@runs
def test_of_queries_that_share_a_mask_one_tile_is_laid_out() -> None:
    mask = drawn("bool", (2, 1, 1, 150))
    for given in (mask, mask.expand(2, 4, 500, 150)):
        laid, found = written(turned(given))
        assert (laid.heads, laid.tiles_q, laid.tiles_k) == (1, 3, 1)
        assert MaskPass.of(given, (0, None), pins=False).place == (3, 0, 1, 0)
        assert torch.equal(found, laid_out(mask.expand(2, 1, 128, 150).mT.cpu()))


def test_packed_sequences_have_no_bounds_of_all() -> None:
    causal = {
        "causal": Causal.LOWER_RIGHT,
        "seqlen_q": 100,
        "seqlen_k": 300,
        "head_dim": 64,
        "batch": 1,
        "num_heads": 1,
    }
    for bounds in (seen_bounds, mask_bounds):
        assert bounds(AttentionShape(**causal, features=Features(mask=MaskKind.BOOLEAN))) == (200, None)
        assert bounds(AttentionShape(**causal, features=Features(mask=MaskKind.BOOLEAN, varlen=True))) == (None, None)
