"""The source of the Hopper forward for short sequences, run on the CPU by tests/support/gluon/machine.py: lengths,
masks, parameters.

What the compiler makes of it is not seen here; test_flash_fwd_hopper_short.py reads the machine code, and on a GPU
test_flash_fwd_hopper_short_gpu.py compares results.
"""

from functools import partial
from typing import Any

import pytest
import torch

from blocktune.kernels.hopper.forward.short import kernel as flash_fwd_hopper_short
from blocktune.kernels.hopper.forward.short.kernel import FlashForwardHopperShort, joins_tiles, output_panels
from blocktune.kernels.values.shape import Causal
from tests.support.gluon import barriers
from tests.support.gluon import hopper_forward as other
from tests.support.gluon import machine as gluon_machine
from tests.support.gluon.hopper_forward import EDGES, HIDDEN, SINKS, read_now, shape_of, tensors

pytestmark = pytest.mark.triton_free

KERNEL = FlashForwardHopperShort()
check, config_of = partial(other.check, kernel=KERNEL), partial(other.config_of, kernel=KERNEL)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_fwd_hopper_short, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("keys", HIDDEN)
def test_infinite_keys(keys: str, causal: Causal) -> None:
    for rows in (256, 200):
        other.check_infinite_keys(shape_of(rows, 256, 128, num_heads=1, causal=causal), HIDDEN[keys], KERNEL)


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
def test_scores_of_any_size(causal: Causal) -> None:
    other.check_huge_scores(shape_of(200, 300, causal=causal), KERNEL)


@pytest.mark.few(8)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sinks(head_dim: int, sinks: str, causal: Causal) -> None:
    other.check_sinks(shape_of(200, 200, head_dim, causal=causal), sinks, KERNEL)
    other.check_sinks(shape_of(300, 100, head_dim, causal=causal), sinks, KERNEL)


@pytest.mark.few(10)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), EDGES)
def test_lengths_around_the_edges_of_tiles(seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    check(shape_of(seqlen_q, seqlen_k, num_heads=1, causal=causal))
    check(shape_of(seqlen_q, seqlen_k, 128, num_heads=1, causal=causal))


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(40, 40), (64, 256), (104, 64), (256, 128), (200, 120)])
def test_widths(head_dim: int, head_dim_v: int, causal: Causal) -> None:
    check(shape_of(100, 170, head_dim, head_dim_v=head_dim_v, causal=causal), layout="bshd")


@pytest.mark.parametrize(
    ("block_m", "block_n", "num_stages", "own"),
    [
        (128, 64, 2, (0, 0, 1)),
        (128, 128, 2, (1, 1, 0)),
        (128, 64, 4, (1, 0, 0)),
        (192, 64, 3, (0, 1, 1)),
        (192, 128, 2, (1, 1, 1)),
        (256, 64, 4, (0, 1, 0)),
        (256, 64, 2, (1, 1, 1)),
    ],
)
def test_parameters(block_m: int, block_n: int, num_stages: int, own: tuple[int, int, int]) -> None:
    """One tile only, one block only, fewer blocks than stages, more programs than tiles."""
    names = {"block_m": block_m, "block_n": block_n, "num_stages": num_stages}
    names |= dict(zip(("split_release", "early_p", "keep_p"), own, strict=True))
    problems = [
        shape_of(64, 64),
        shape_of(300, 300, causal=Causal.UPPER_LEFT),
        shape_of(130, 420, num_heads=1, causal=Causal.LOWER_RIGHT),
        shape_of(300, 300, num_heads=1),
    ]
    for number, problem in enumerate(problems):
        check(problem, config_of(problem, **names), programs=1 + number)


@pytest.mark.few(5)
@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "block_n", "num_stages", "panels"),
    [(128, 128, 128, 2, 2), (128, 256, 64, 3, 2), (256, 128, 64, 2, 2), (128, 256, 64, 2, 4), (128, 128, 64, 4, 2)],
)
def test_tiles_that_meet(
    head_dim: int, head_dim_v: int, block_n: int, num_stages: int, panels: int, split: int
) -> None:
    """Many of one program, in a step or behind it; the output through panels, which may take turns."""
    names = {"block_m": 128, "block_n": block_n, "num_stages": num_stages, "split_release": split}
    for changes in ({}, {"causal": Causal.UPPER_LEFT}, {"seqlen_q": 130, "causal": Causal.LOWER_RIGHT}):
        problem = shape_of(**{"seqlen_q": 256, "head_dim": head_dim, "head_dim_v": head_dim_v} | changes)
        config = config_of(problem, **names)
        assert output_panels(config, problem) == panels
        assert joins_tiles(config, problem) == (changes == {} or (block_n == 128 and "seqlen_q" not in changes))
        check(problem, config, programs=1)


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 2)])
def test_grouped_heads_of_a_batch(heads: tuple[int, int]) -> None:
    sizes = {"batch": 2, "num_heads": heads[0], "num_heads_kv": heads[1]}
    check(shape_of(150, 150, **sizes, causal=Causal.UPPER_LEFT), layout="bshd", programs=3)


def test_strided_tensors() -> None:
    """Slices of a fused projection, and heads that begin in the middle of a row."""
    problem = shape_of(100, 100, num_heads=2, num_heads_kv=2)
    fused = torch.randn(1, 100, 3, 2, 64).half()
    check(problem, qkv=[fused[:, :, part].transpose(1, 2) for part in range(3)])


def test_scores_that_grow() -> None:
    """The running maximum is raised in every block."""
    for head_dim in (64, 128):
        problem = shape_of(200, 300, head_dim)
        q, k, v = tensors(problem)
        check(problem, qkv=[q, (k.float() * torch.linspace(16, 0.1, 300)[:, None]).half(), v])


WRONG: dict[str, Any] = {
    "warpgroup_mma_wait": read_now,
    "release_values": lambda *arguments: None,  # nothing but unused slots is ever given back
    "release_keys": lambda *arguments: None,  # nor Q
    "pass_over": lambda count, memory, slot, options: slot,
    "pin": lambda x: x * 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_machine_notices_wrong_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gluon_machine.STAND_INS, name, WRONG[name])
    monkeypatch.setattr(barriers, "PATIENCE", 0.2)
    with pytest.raises((AssertionError, TimeoutError)):
        check(shape_of(400, 400, batch=2, causal=Causal.UPPER_LEFT), programs=1)
