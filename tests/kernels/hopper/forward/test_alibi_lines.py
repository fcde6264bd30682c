"""ALiBi as a product of the Hopper forward: who takes it, its operands, and slopes of all sizes, on the CPU."""

from typing import Any

import pytest
import torch

from blocktune.kernels.base.on_chip import ChipMemory
from blocktune.kernels.hopper.forward import launch as forward_launch
from blocktune.kernels.hopper.forward import lines
from blocktune.kernels.hopper.forward.layout import draws_lines, line_bytes
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.gluon.hopper_forward import HOPPER, KERNEL, compare, config_of, run, shape_of, tensors
from tests.support.gluon.machine import as_python

pytestmark = pytest.mark.triton_free

SLOPES = (0.0, 1.0, 0.7071067690849304, 1 / 3, 1e-5, 123.456, 2.0**-40 / 3)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_launch, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("features", "head_dim", "own", "draws"),
    [
        ("alibi", 64, {}, True),
        ("alibi", 64, {"block_m": 192, "block_n": 128}, True),
        ("alibi window=40:20", 64, {}, True),
        ("varlen alibi", 64, {}, True),
        ("alibi", 128, {"block_n": 64, "num_stages": 3}, True),
        ("alibi", 128, {"block_n": 128, "num_stages": 2}, False),  # no registers
        ("alibi", 256, {}, False),
        ("", 64, {}, False),
        ("alibi softcap", 64, {}, False),
        ("alibi dropout", 64, {}, False),
        ("alibi boolean", 64, {}, False),
        ("alibi additive", 64, {}, False),
    ],
)
def test_lines_are_products_where_there_is_room(features: str, head_dim: int, own: dict[str, int], draws: bool) -> None:
    problem = shape_of(300, 300, head_dim, features)
    assert draws_lines(config_of(problem, **own), problem) == draws


def test_places_of_keys_are_shared_memory_that_the_models_know() -> None:
    problem, plain = (shape_of(300, 300, features=words) for words in ("alibi", ""))
    config = config_of(problem)
    (tile,) = KERNEL.further_tiles(config, problem, HOPPER)
    assert tile.place is ChipMemory.SHARED_MEMORY
    assert tile.bytes == line_bytes(config) == 64 * 16 * 2
    assert KERNEL.shared_bytes(config, problem, HOPPER) == KERNEL.shared_bytes(config, plain, HOPPER) + tile.bytes
    assert KERNEL.further_tiles(config, plain, HOPPER) == ()


def test_no_line_where_the_tiles_leave_no_memory() -> None:
    problem = shape_of(300, 300, 128, "alibi", head_dim_v=64)
    full = config_of(problem, block_m=192, block_n=64, num_stages=4, early_p=1, keep_p=0)
    assert draws_lines(full, problem)
    assert not draws_lines(config_of(problem, block_m=128, block_n=128, num_stages=4), problem)


@pytest.mark.parametrize("slope", SLOPES)
def test_three_terms_are_a_slope(slope: float) -> None:
    """To the last bit of float32, as the sum of the products with one place."""
    terms = as_python(lines.terms_of_slope)(slope, None)
    assert terms.dtype is torch.bfloat16
    assert (terms == terms[:1]).all()
    assert terms.double().sum(1).tolist() == [float(torch.tensor(slope))] * 64
    assert (terms[:, lines.TERMS.value :] == 0).all()


@pytest.mark.parametrize("block_n", [64, 128])
def test_places_are_those_of_keys(block_n: int) -> None:
    places = as_python(lines.places_of_keys)(block_n).load()
    keys = torch.arange(block_n).float()
    for column in range(lines.LINE_COLUMNS.value):
        assert torch.equal(places[:, column].float(), keys if column < lines.TERMS.value else 0 * keys)


def check(problem: AttentionShape, slopes: torch.Tensor) -> None:
    qkv, extras = tensors(problem), Extras(alibi_slopes=slopes.expand(problem.batch, -1))
    options: dict[str, Any] = {"causal": problem.causal, "features": problem.features, "extras": extras}
    config = config_of(problem)
    assert draws_lines(config, problem)
    found = run(problem, config, qkv, extras, programs=2)
    compare(*found, *attention_reference(*qkv, **options, dtype=torch.float64))


@pytest.mark.few(3)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("slopes", [(0.0, 3.0), (8.0, 1e-4), (-0.2, 0.5)])
def test_slopes_of_all_sizes(slopes: tuple[float, float], causal: Causal) -> None:
    """Rows see one key alone, or nearly all alike; a slope below zero raises the maximum in every block."""
    for seqlen_q, seqlen_k in ((300, 500), (257, 257)):
        check(shape_of(seqlen_q, seqlen_k, features="alibi", causal=causal), torch.tensor(slopes))
