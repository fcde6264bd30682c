"""The source of the Hopper forward, run on the CPU by tests/support/gluon/machine.py: every length, mask and feature.

Its parameters are in test_flash_fwd_hopper_parameters.py. What the compiler makes of it is not seen here;
test_hopper_fwd_machine_code.py reads the machine code, and on a GPU test_flash_fwd_hopper_gpu.py compares results.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from blocktune.kernels.hopper.forward import launch as flash_fwd_hopper
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import Causal
from blocktune.tuner.correctness.forward import HARD, PLAIN
from tests.support.gluon import barriers
from tests.support.gluon import machine as gluon_machine
from tests.support.gluon.hopper_forward import (
    EDGES,
    HIDDEN,
    LSE_TOLERANCE,
    SEQUENCES,
    SINKS,
    WINDOWS,
    check,
    check_huge_scores,
    check_infinite_keys,
    check_sinks,
    compare,
    config_of,
    run,
    shape_of,
    tensors,
)

pytestmark = pytest.mark.triton_free


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_fwd_hopper, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))


@pytest.mark.few(8)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("keys", HIDDEN)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_infinite_keys(head_dim: int, keys: str, causal: Causal) -> None:
    """Also where every row sees a key, so that nothing else looks at its first block."""
    check_infinite_keys(shape_of(256, 256, head_dim, num_heads=1, causal=causal), HIDDEN[keys])
    check_infinite_keys(shape_of(200, 256, head_dim, num_heads=1, causal=causal), HIDDEN[keys])


@pytest.mark.few(10)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), EDGES)
def test_lengths_around_the_edges_of_tiles(seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    check(shape_of(seqlen_q, seqlen_k, num_heads=1, causal=causal))
    check(shape_of(seqlen_q, seqlen_k, 128, num_heads=1, causal=causal))


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("head_dim", [24, 40, 64, 80, 96, 128, 160, 192, 256])
def test_every_head_dimension(head_dim: int, causal: Causal) -> None:
    check(shape_of(100, 170, head_dim, causal=causal), layout="bshd")


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(192, 128), (128, 192), (64, 256), (256, 64), (96, 64), (256, 192), (72, 200)]
)
def test_heads_of_two_dimensions(head_dim: int, head_dim_v: int) -> None:
    check(shape_of(100, 170, head_dim, head_dim_v=head_dim_v, causal=Causal.LOWER_RIGHT), layout="bshd")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (100, 300), (300, 100)])
def test_windows(window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> None:
    features = f"window={window[0]}:{window[1]}"
    check(shape_of(seqlen_q, seqlen_k, features=features, num_heads=1))
    if window[0] >= 0:
        check(shape_of(seqlen_q, seqlen_k, 128, features, num_heads=1, causal=Causal.LOWER_RIGHT))


@pytest.mark.parametrize("features", ["softcap", "softcap window=70:0"])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_soft_cap(features: str, head_dim: int) -> None:
    check(shape_of(100, 200, head_dim, features, causal=Causal.LOWER_RIGHT))


def off_by_its_error(x: torch.Tensor) -> torch.Tensor:
    """tanh as far off as the PTX ISA allows its instruction to be, to either side."""
    return torch.tanh(x) * (1 + 2**-11 * torch.cos(1e5 * x))


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize("softcap", [1.5, 30.0, 50.0])
@pytest.mark.parametrize(
    ("query_scale", "tolerance"), [(1.0, PLAIN["bfloat16"].output), (80.0, HARD["bfloat16"].output)]
)
def test_soft_cap_with_the_error_of_its_instruction(
    query_scale: float, tolerance: float, softcap: float, causal: Causal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of usual scores, and of scores next to the cap."""
    monkeypatch.setitem(gluon_machine.STAND_INS, "tanh", off_by_its_error)
    problem, extras = shape_of(256, 256, features="softcap", causal=causal), Extras(softcap=softcap)
    q, k, v = tensors(problem)
    q *= query_scale
    out, lse = run(problem, config_of(problem), [q, k, v], extras, 2)
    right, right_lse = attention_reference(q, k, v, causal=causal, features=problem.features, extras=extras)
    assert (out.float() - right).norm() <= tolerance * right.norm()
    assert ((lse - right_lse).abs() <= 2**-11 * min(softcap, 8 * query_scale) + LSE_TOLERANCE).all()


@pytest.mark.few(6)
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("features", ["", "window=20:9", "softcap"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (300, 100)])
def test_sinks(seqlen_q: int, seqlen_k: int, features: str, sinks: str) -> None:
    """Also of rows that see no key."""
    check_sinks(shape_of(seqlen_q, seqlen_k, 64, features, causal=Causal.LOWER_RIGHT), sinks)
    check_sinks(shape_of(seqlen_q, seqlen_k, 192, features), sinks)


@pytest.mark.few(8)
@pytest.mark.parametrize(("lengths_q", "lengths_k"), SEQUENCES)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(
    ("features", "sunk"),
    [("varlen", False), ("varlen window=70:20", False), ("varlen softcap", False), ("varlen", True)],
)
def test_packed_sequences(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], causal: Causal, features: str, sunk: bool
) -> None:
    """Behind the last sequence there are tokens that nobody may read (NaN) or write."""
    sizes = {"seqlen_q": max(lengths_q), "seqlen_k": max(lengths_k), "batch": len(lengths_q)}
    problem, layout = shape_of(**sizes, features=features, causal=causal), "bhsd" if len(lengths_q) > 2 else "bshd"
    rows, keys = sum(lengths_q), sum(lengths_k)
    q, k, v = tensors(problem, layout, (rows + 3, keys + 3))
    for tensor, length in ((q, rows), (k, keys), (v, keys)):
        tensor[:, :, length:] = float("nan")
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (lengths_q, lengths_k)
    )
    softcap = 1.5 if problem.features.softcap else 0.0
    extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, softcap=softcap)
    sinks = torch.tensor(SINKS["usual"]) if sunk else None
    out, lse = run(problem, config_of(problem), [q, k, v], replace(extras, sinks=sinks), 2)
    assert (out[:, :, rows:] == 7).all()
    assert (lse[:, rows:] == 7).all()
    parts = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
    expected = attention_reference(*parts, causal=problem.causal, features=problem.features, extras=extras)
    if sinks is not None:
        expected = with_sinks(*expected, sinks)
    compare(out[:, :, :rows], lse[:, :rows], *expected)


@pytest.mark.parametrize(("block_m", "num_stages"), [(192, 2), (256, 2), (256, 3)])
def test_packed_sequences_whose_tiles_hide_many_blocks_on_the_left(
    block_m: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows of a tile see as few of its first blocks as there are slots: the producer waits for these rows."""
    monkeypatch.setattr(barriers, "PATIENCE", 10.0)
    problem = shape_of(500, 500, features="varlen window=90:0", batch=2, num_heads=1, causal=Causal.LOWER_RIGHT)
    qkv, bounds = tensors(problem, "bshd", (500, 500)), torch.tensor([0, 500, 500], dtype=torch.int32)
    extras = Extras(cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    config = config_of(problem, block_m=block_m, block_n=64, num_stages=num_stages, early_p=1, q_registers=0)
    expected = attention_reference(*qkv, causal=problem.causal, features=problem.features, extras=extras)
    compare(*run(problem, config, qkv, extras, 1), *expected)


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 2)])
def test_grouped_heads_of_a_batch(heads: tuple[int, int]) -> None:
    sizes = {"batch": 2, "num_heads": heads[0], "num_heads_kv": heads[1]}
    check(shape_of(150, 150, **sizes, causal=Causal.UPPER_LEFT), layout="bshd", programs=3)


def test_strided_tensors() -> None:
    """Slices of a fused projection, and heads that begin in the middle of a row."""
    problem = shape_of(100, 100, num_heads=2, num_heads_kv=2)
    fused = torch.randn(1, 100, 3, 2, 64).half()
    check(problem, qkv=[fused[:, :, part].transpose(1, 2) for part in range(3)])


def test_scores_that_grow_and_values_that_nobody_may_see() -> None:
    """The running maximum is raised in every block; NaN behind the diagonal and beyond the window of no query."""
    problem = shape_of(200, 300, causal=Causal.UPPER_LEFT)
    q, k, v = tensors(problem)
    k = (k.float() * torch.linspace(16, 0.1, 300)[:, None]).half()
    k[:, :, 200:], v[:, :, 256:] = float("nan"), float("nan")
    out, lse = run(problem, config_of(problem), [q, k, v], Extras(), 2)
    compare(out, lse, *attention_reference(q, k[:, :, :200], v[:, :, :200], causal=Causal.UPPER_LEFT))


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
def test_scores_of_any_size(causal: Causal) -> None:
    """Next to rows of usual scores some of 2^31: positive in any block, or negative in all, with pairs of equal keys.

    The maxima of such rows are rounded by more than any exponent holds.
    """
    check_huge_scores(shape_of(200, 300, causal=causal))
    check_huge_scores(shape_of(200, 300, causal=causal), sinks=torch.tensor(SINKS["usual"]))
