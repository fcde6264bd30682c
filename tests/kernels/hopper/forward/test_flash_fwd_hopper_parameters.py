"""The parameters of the Hopper forward: its source on the CPU, by tests/support/gluon/machine.py."""

import itertools

import pytest
import torch

from blocktune.kernels.hopper.forward import launch as flash_fwd_hopper
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import Causal
from tests.support.gluon.hopper_forward import (
    check,
    compare,
    config_of,
    run,
    shape_of,
    tensors,
)

pytestmark = pytest.mark.triton_free

PAIRS = {"num_stages": 2, "split_release": 1}
"""Slots of K and V together, where the default is one ring."""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_fwd_hopper, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("block_m", "block_n", "num_stages", "own"),
    [
        (128, 64, 2, (0, 0, 1)),
        (128, 128, 2, (1, 1, 0)),
        (128, 64, 4, (1, 0, 0)),
        (192, 64, 3, (0, 1, 1)),
        (192, 128, 2, (1, 1, 1)),
        (192, 64, 2, (1, 1, 1)),
        (256, 64, 4, (0, 1, 0)),
        (192, 128, 2, (0, 1, 0)),
        (256, 64, 3, (1, 1, 1)),
        (128, 64, 5, (2, 0, 0)),
        (128, 128, 3, (2, 1, 1)),
        (192, 64, 3, (2, 1, 0)),
        (256, 64, 4, (2, 1, 1)),
    ],
)
def test_parameters(block_m: int, block_n: int, num_stages: int, own: tuple[int, int, int]) -> None:
    """One tile only, one block only, fewer blocks than stages, more programs than tiles."""
    names = {"block_m": block_m, "block_n": block_n, "num_stages": num_stages, "q_registers": 0}
    names |= dict(zip(("split_release", "early_p", "keep_p"), own, strict=True))
    for number, problem in enumerate(
        [
            shape_of(64, 64),
            shape_of(300, 300, causal=Causal.UPPER_LEFT),
            shape_of(130, 420, num_heads=1, causal=Causal.LOWER_RIGHT),
            shape_of(300, 300, num_heads=1, features="window=90:30"),
        ]
    ):
        check(problem, config_of(problem, **names), programs=1 + number)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "own"),
    [
        (64, 64, {"block_m": 128, "block_n": 64, "q_registers": 64}),
        (96, 96, {"q_registers": 64}),
        (128, 128, {"block_n": 64, "num_stages": 4, "split_release": 0, "q_registers": 128}),
        (128, 128, {"block_m": 192, "block_n": 64, "num_stages": 4, "early_p": 1, "q_registers": 64}),
        (192, 128, {"q_registers": 64}),
        (192, 128, {"q_registers": 128}),
        (192, 128, {"block_n": 128, "num_stages": 2, "split_release": 1, "early_p": 1, "q_registers": 192}),
        (192, 192, {"q_registers": 192}),
        (256, 64, {"q_registers": 64}),
        (256, 256, PAIRS | {"q_registers": 64, "early_p": 0, "output_panels": 0}),
        (256, 256, PAIRS | {"q_registers": 128, "output_panels": 1}),
        (256, 256, PAIRS | {"q_registers": 0, "output_panels": 1}),
        (256, 256, {"q_registers": 128, "output_panels": 1}),
        (256, 256, {"num_stages": 5, "output_panels": 0}),
    ],
)
def test_queries_in_registers(head_dim: int, head_dim_v: int, own: dict[str, int]) -> None:
    """A part of them, all of one part of a tile, or all, with the output in every kind of memory."""
    for seqlen_q, seqlen_k, causal in ((200, 200, Causal.UPPER_LEFT), (130, 170, Causal.NONE)):
        problem = shape_of(seqlen_q, seqlen_k, head_dim, head_dim_v=head_dim_v, num_heads=1, causal=causal)
        check(problem, config_of(problem, **own))


@pytest.mark.parametrize("features", ["varlen", "varlen window=70:20"])
def test_panels_of_packed_sequences(features: str) -> None:
    """An output of 256 columns leaves panel by panel, each up to the end of its sequence."""
    problem = shape_of(100, 129, 256, features, batch=3)
    lengths_q, lengths_k = (100, 0, 65), (30, 64, 129)
    rows, keys = sum(lengths_q), sum(lengths_k)
    q, k, v = tensors(problem, "bhsd", (rows + 3, keys + 3))
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (lengths_q, lengths_k)
    )
    extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out, lse = run(problem, config_of(problem, output_panels=1), [q, k, v], extras, 2)
    assert (out[:, :, rows:] == 7).all()
    parts = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
    expected = attention_reference(*parts, causal=problem.causal, features=problem.features, extras=extras)
    compare(out[:, :, :rows], lse[:, :rows], *expected)
