"""Gradients of the Hopper backward beyond whole tiles on a GPU, against float64 autograd, with a limit of time for each
test, because what is wrong with a barrier shows as a hang."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.backward.kernel import FlashBackwardHopper
from blocktune.kernels.hopper.backward.parts import heads_per_group
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.kernels.portable.backward.test_flash_bwd_dense import Gradients, backward, check, run
from tests.support.attention.feature_cases import extras_of, packed, shape_of, tensors
from tests.support.hopper_gpu import skip_elsewhere

HOPPER = limits_for((9, 0))
KERNEL = FlashBackwardHopper()
NO, UPPER_LEFT, LOWER_RIGHT = Causal
WIDTHS = pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
ALIGNMENTS = pytest.mark.parametrize("causal", Causal)
pytestmark = [
    pytest.mark.timeout(90, method="thread"),  # ends the process: a hanging GPU answers no signal
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


@pytest.fixture
def on_hopper() -> None:
    skip_elsewhere(KERNEL)


def problem(
    seqlen_q: int, seqlen_k: int, head_dim: int, causal: Causal = NO, features: str = "", **changes: Any
) -> Any:
    sizes = {"num_heads": 2, "num_heads_kv": 2, "dtype": "bfloat16"} | changes
    return shape_of(features, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, causal=causal, **sizes)


def default(shape: AttentionShape, **changes: int) -> KernelConfig:
    return KernelConfig.of(KERNEL.name, KERNEL.default_config(backward(shape), HOPPER).parameters | changes)


def compare(shape: AttentionShape, *given: Any, **changes: int) -> Gradients:
    return check(shape, default(shape, **changes), *given)


RAGGED = [(1, 1), (63, 65), (64, 127), (65, 129), (127, 128), (128, 129), (129, 1), (1, 300), (200, 1000), (700, 333)]


@pytest.mark.gpu
@WIDTHS
@ALIGNMENTS
def test_ragged_and_cross_lengths(head_dim: int, causal: Causal, on_hopper: None) -> None:
    """Around the edges of tiles, of one query or key, and far apart in both directions."""
    for seqlen_q, seqlen_k in RAGGED:
        compare(problem(seqlen_q, seqlen_k, head_dim, causal, batch=2))


@pytest.mark.gpu
@ALIGNMENTS
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_whole_tiles_of_unequal_lengths(dims: tuple[int, int], causal: Causal, on_hopper: None) -> None:
    """Forms without an edge."""
    for seqlen_q, seqlen_k in ((128, 640), (1024, 256), (192, 384), (64, 128)):
        compare(problem(seqlen_q, seqlen_k, dims[0], causal, head_dim_v=dims[1], dtype="float16"))


DIMS = [(40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (136, 136), (160, 160), (200, 200), (248, 248)]
DIMS += [(64, 128), (128, 64), (96, 128), (192, 128), (128, 192), (256, 40)]


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_head_dimensions(head_dim: int, head_dim_v: int, on_hopper: None) -> None:
    for layout in ("bhsd", "bshd"):
        shape = problem(200, 333, head_dim, LOWER_RIGHT, head_dim_v=head_dim_v, batch=2, num_heads=4)
        compare(shape, tensors(shape, layout))


@pytest.mark.gpu
@WIDTHS
@ALIGNMENTS
def test_grouped_heads(head_dim: int, causal: Causal, on_hopper: None) -> None:
    for heads, heads_kv in ((8, 1), (8, 2), (3, 3)):
        shape = problem(129, 200, head_dim, causal, num_heads=heads, num_heads_kv=heads_kv, batch=2)
        compare(shape, tensors(shape, "bshd"))


WINDOWS = [("0:0", NO), ("-1:3", NO), ("3:-1", NO), ("40:40", NO), ("130:200", NO), ("64:64", NO)]
WINDOWS += [("0:-1", UPPER_LEFT), ("100:-1", LOWER_RIGHT), ("300:-1", LOWER_RIGHT)]


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize(("window", "causal"), WINDOWS)
def test_windows(head_dim: int, window: str, causal: Causal, on_hopper: None) -> None:
    for lengths in ((300, 300), (100, 700), (700, 100), (1, 200)):
        compare(problem(*lengths, head_dim, causal, f"window={window}"))


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize(("window", "causal"), [("64:64", NO), ("200:-1", LOWER_RIGHT)])
def test_windows_over_whole_tiles(head_dim: int, window: str, causal: Causal, on_hopper: None) -> None:
    for lengths in ((512, 512), (256, 640)):
        compare(problem(*lengths, head_dim, causal, f"window={window}"))


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize(("causal", "word", "fold_delta"), [(LOWER_RIGHT, "", 1), (NO, "window=50:60", 0)])
def test_soft_cap(head_dim: int, causal: Causal, word: str, fold_delta: int, on_hopper: None) -> None:
    shape = problem(300, 333, head_dim, causal, f"softcap {word}")
    q, k, v = tensors(shape)
    compare(shape, (q, k, v), fold_delta=fold_delta)
    compare(shape, (q * 5, k * 5, v), fold_delta=fold_delta)


LENGTHS_Q, LENGTHS_K = (5, 70, 0, 33, 128, 8, 1), (90, 64, 7, 0, 257, 2, 1)


@pytest.mark.gpu
@WIDTHS
@ALIGNMENTS
@pytest.mark.parametrize("others", ["", "window=20:9 softcap deterministic"])
def test_packed_sequences(head_dim: int, causal: Causal, others: str, on_hopper: None) -> None:
    shape = problem(128, 257, head_dim, causal, f"varlen {others}", batch=7, num_heads=4)
    qkv, extras = packed(shape, LENGTHS_Q, LENGTHS_K)
    dq, dk, dv = compare(shape, qkv, extras)
    assert (dq[:, :, 75:108] == 0).all()  # queries of a sequence without keys
    assert (dk[:, :, 154:161] == 0).all()  # keys of a sequence without queries
    assert (dv[:, :, 154:161] == 0).all()


@pytest.mark.gpu
@WIDTHS
def test_many_packed_sequences(head_dim: int, on_hopper: None) -> None:
    """More tiles than multiprocessors, most of them empty."""
    generator = torch.Generator().manual_seed(3)
    lengths = (torch.rand(40, generator=generator) ** 4 * 900).int().tolist()
    shape = problem(1000, 1000, head_dim, LOWER_RIGHT, "varlen", batch=40, num_heads=8)
    compare(shape, *packed(shape, lengths, lengths[::-1]))


def within_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a part of a longer one, whose other rows are NaN."""
    batch, heads, rows, dim = tensor.shape
    wide = torch.full((batch, heads, rows + 200, dim), float("nan"), dtype=tensor.dtype, device=tensor.device)
    wide[:, :, :rows] = tensor
    return wide[:, :, :rows]


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize("features", ["", "varlen"])
def test_rows_past_the_end_are_not_read(head_dim: int, features: str, on_hopper: None) -> None:
    """Neither those of the next head, nor those behind the last packed sequence."""
    shape = problem(70, 90, head_dim, LOWER_RIGHT, features)
    if features:
        shape = replace(shape, batch=2)
        qkv, extras = packed(shape, (70, 33), (90, 50))
        wide = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in qkv]
        compare(shape, [within_nan(tensor) for tensor in wide], extras)
    else:
        compare(shape, [within_nan(tensor) for tensor in tensors(shape)])


@pytest.mark.gpu
@WIDTHS
def test_a_packed_sequence_does_not_read_the_next(head_dim: int, on_hopper: None) -> None:
    """The second one's tensors are NaN; the first one's gradients are as if it were alone."""
    shape = problem(70, 90, head_dim, LOWER_RIGHT, "varlen", batch=2)
    qkv, extras = packed(shape, (70, 33), (90, 50))
    right = check(shape, default(shape), qkv, extras)
    poisoned = [tensor.clone() for tensor in qkv]
    for tensor, rows in zip(poisoned, (70, 90, 90), strict=True):
        tensor[:, :, rows:] = float("nan")
    found, _ = run(shape, poisoned, extras, default(shape))
    for gradient, wanted, rows in zip(found, right, (70, 90, 90), strict=True):
        torch.testing.assert_close(gradient[:, :, :rows], wanted[:, :, :rows], rtol=0.02, atol=0.01)


@pytest.mark.gpu
@WIDTHS
def test_rows_that_see_no_key_have_no_gradient(head_dim: int, on_hopper: None) -> None:
    """Their log-sum-exp is -inf, and -inf minus -inf would be NaN in the recomputed probabilities."""
    dq, _, _ = compare(problem(300, 100, head_dim, LOWER_RIGHT))
    assert (dq[:, :, :200] == 0).all()
    dq, _, _ = compare(problem(300, 100, head_dim, UPPER_LEFT, "window=20:-1"))
    assert (dq[:, :, 120:] == 0).all()
    _, dk, dv = compare(problem(100, 300, head_dim, UPPER_LEFT))  # keys that nobody sees
    assert (dk[:, :, 100:] == 0).all()
    assert (dv[:, :, 100:] == 0).all()


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize("features", ["", "varlen", "softcap", "window=90:-1"])
def test_infinite_keys_do_not_meet_the_rows_past_the_end(head_dim: int, features: str, on_hopper: None) -> None:
    """A query of zeros times an infinite key is NaN, which a probability of 0 would not undo."""
    shape = problem(100, 90, head_dim, LOWER_RIGHT, features)
    qkv, extras = packed(shape, (100,), (90,)) if "varlen" in features else (tensors(shape), extras_of(shape))
    q, k, v = (tensor.clone() for tensor in qkv)
    q.abs_()
    k[:, :, 10] = float("-inf")
    (_, dk, dv), _ = run(shape, [q, k, v], extras, default(shape))
    assert torch.isfinite(dk).all()
    assert torch.isfinite(dv).all()


@pytest.mark.gpu
@WIDTHS
@ALIGNMENTS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_large_scores(head_dim: int, causal: Causal, dtype: str, on_hopper: None) -> None:
    shape = problem(300, 200, head_dim, causal, dtype=dtype)
    q, k, v = tensors(shape)
    compare(shape, (q * 4, k * 4, v))


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize("features", ["", "window=300:-1"])
def test_more_tiles_than_multiprocessors(head_dim: int, features: str, on_hopper: None) -> None:
    for causal in (UPPER_LEFT, LOWER_RIGHT):
        compare(problem(1000, 1100, head_dim, causal, features, batch=4, num_heads=8, num_heads_kv=4))


@pytest.mark.gpu
@pytest.mark.parametrize("features", ["", "window=300:20 softcap", "deterministic", "additive"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 144, 192, 256])
def test_groups_in_parts_of_any_length(head_dim: int, features: str, on_hopper: None) -> None:
    if head_dim > 128 and features == "deterministic":
        pytest.skip("wide heads in a fixed order have one part")
    for lengths in ((130, 300), (1000, 1100), (70, 1)):
        for parts in (2, 4):
            asked = problem(*lengths, head_dim, LOWER_RIGHT, features, batch=2, num_heads=8, num_heads_kv=2)
            compare(asked, group_parts=parts)


@pytest.mark.gpu
@pytest.mark.parametrize("features", ["varlen", "varlen window=60:20 softcap"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_groups_of_packed_sequences_in_parts(head_dim: int, features: str, on_hopper: None) -> None:
    for parts in (2, 4):
        shape = problem(128, 257, head_dim, NO, features, batch=7, num_heads=8, num_heads_kv=2)
        qkv, extras = packed(shape, LENGTHS_Q, LENGTHS_K)
        _, dk, dv = compare(shape, qkv, extras, group_parts=parts)
        assert (dk[:, :, 154:161] == 0).all()  # keys of a sequence without queries
        assert (dv[:, :, 154:161] == 0).all()


def same_bits(results: Sequence[Gradients]) -> bool:
    return all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


ORDERED = [(NO, "", 2000), (LOWER_RIGHT, "", 2000), (LOWER_RIGHT, "window=300:-1", 2000), (NO, "window=200:20", 1111)]


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize(("causal", "window", "length"), ORDERED)
def test_deterministic_gradients_are_equal_to_the_bit(
    head_dim: int, causal: Causal, window: str, length: int, on_hopper: None
) -> None:
    shape = problem(length, 2000, head_dim, causal, f"deterministic {window}", batch=2, num_heads=6)
    qkv, best = tensors(shape), default(shape)
    results = [run(shape, qkv, Extras(), best)[0] for _ in range(3)]
    assert same_bits(results)
    check(shape, best, qkv)


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize("lengths", [(500, 500), (512, 512), (300, 700), (700, 300)], ids=str)
def test_the_last_of_many_heads_walk_back_in_a_fixed_order(
    head_dim: int, lengths: tuple[int, int], on_hopper: None
) -> None:
    """Under a diagonal, where heads are several groups."""
    shape = problem(*lengths, head_dim, LOWER_RIGHT, "deterministic", batch=4, num_heads=12, num_heads_kv=12)
    assert heads_per_group(backward(shape), 1) == 16
    qkv, best = tensors(shape), default(shape)
    assert same_bits([run(shape, qkv, Extras(), best)[0] for _ in range(3)])
    check(shape, best, qkv)


@pytest.mark.gpu
@WIDTHS
def test_deterministic_packed_sequences(head_dim: int, on_hopper: None) -> None:
    shape = problem(700, 900, head_dim, LOWER_RIGHT, "varlen deterministic", batch=5, num_heads=8)
    qkv, extras = packed(shape, (700, 0, 65, 333, 600), (900, 20, 0, 300, 650))
    best = default(shape)
    assert same_bits([run(shape, qkv, extras, best)[0] for _ in range(3)])
    check(shape, best, qkv, extras)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dq_alone_differs_without_a_fixed_order(head_dim: int, on_hopper: None) -> None:
    shape = problem(2000, 2000, head_dim, LOWER_RIGHT, batch=2, num_heads=6)
    qkv, best = tensors(shape), default(shape)
    results = [run(shape, qkv, Extras(), best)[0] for _ in range(3)]
    for _, dk, dv in results[1:]:
        assert torch.equal(dk, results[0][1])
        assert torch.equal(dv, results[0][2])


def switches(head_dim: int) -> list[dict[str, int]]:
    """Every pair of named barriers and persistence, the other parameters in turns."""
    found = []
    wide, most = head_dim > 128, {64: 3, 128: 2, 192: 2, 256: 1}[head_dim]
    for number, (named, persistent) in enumerate(product(range(2 if wide else 4), (0, 1))):
        changes = {"num_stages": 2 + number % most, "fold_lse": number // 2 % 2, "fold_delta": (number // 4 + wide) % 2}
        found.append(changes | {"named_barriers": named, "persistent": persistent})
    return found


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@WIDTHS
def test_every_switch_is_right(head_dim: int, part: int, on_hopper: None) -> None:
    """With one step, fewer steps than stages, and more tiles than multiprocessors."""
    for changes in switches(head_dim)[part::4]:
        for lengths in ((40, 60), (130, 300), (1000, 1100)):
            compare(problem(*lengths, head_dim, LOWER_RIGHT, "window=400:-1", batch=2, num_heads=8), **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
def test_launches_of_two_streams_do_not_meet(head_dim: int, on_hopper: None) -> None:
    shape = problem(1000, 777, head_dim, LOWER_RIGHT, "deterministic", num_heads=8)
    qkv, best = tensors(shape), default(shape)
    expected = check(shape, best, qkv)
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            found.append(run(shape, qkv, Extras(), best)[0])
    torch.cuda.synchronize()
    assert same_bits([expected, *found])


@pytest.mark.gpu
@WIDTHS
def test_features_by_name(head_dim: int, on_hopper: None) -> None:
    """All that the kernel says it serves but biases and dropout, which have tests of their own, together."""
    features = "varlen softcap deterministic window=100:-1"
    assert Features.parse(features).names == KERNEL.features - {"alibi", "boolean", "additive", "dropout"}
    shape = problem(300, 400, head_dim, LOWER_RIGHT, features, batch=3, num_heads=4, num_heads_kv=2)
    qkv, extras = packed(shape, (300, 0, 129), (400, 64, 100))
    compare(shape, qkv, replace(extras, softcap=extras_of(shape).softcap))
