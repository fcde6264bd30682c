"""Which config the ladder offers, in which order, and why it passes over the others."""

import dataclasses
from collections.abc import Iterable

import pytest

from blocktune.kernels import registry
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.selection.fallback import ConfigTable, climb_down
from blocktune.runtime.selection.ladder import Candidate, Rejection, Rung
from blocktune.runtime.selection.near_shapes import distance
from blocktune.runtime.selection.reasons import explain_candidate
from blocktune.runtime.store_reader.provenance import MAX_NEIGHBOURS, Reuse
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from tests.support.fakes.dispatch_fakes import H200, PlainKernel, config, shape_like, tuned

pytestmark = pytest.mark.triton_free

SHAPE = shape_like(1024)
DEFAULT = KernelConfig("plain", 64, 32, 4, 2)


WITHOUT_TIMES = [rung for rung in Rung if rung not in (Rung.FROZEN, Rung.EXPECTED, Rung.SDPA)]
"""The rungs that a table has of itself: what decides by expected times is given to it."""


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    kernel = PlainKernel()
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel})
    return kernel


def steps(rows: Iterable[TunedConfig], shape: AttentionShape = SHAPE) -> list[Candidate | Rejection]:
    return list(climb_down(ConfigTable(rows), shape, H200.limits))


def offered(rows: Iterable[TunedConfig], shape: AttentionShape = SHAPE) -> list[tuple[Rung, KernelConfig]]:
    return [(step.rung, step.config) for step in steps(rows, shape) if isinstance(step, Candidate)]


def test_without_rows_the_default_remains_and_every_higher_rung_has_a_reason() -> None:
    *passed_over, last = steps([])
    assert isinstance(last, Candidate)
    assert (last.rung, last.config, last.origin) == (Rung.DEFAULT, DEFAULT, Origin.DEFAULT)
    assert [step.rung for step in passed_over] == WITHOUT_TIMES[:-1]
    assert all(isinstance(step, Rejection) and step.reason for step in passed_over)


def test_the_rungs_follow_each_other() -> None:
    configs = [config(m, w) for m in (64, 128) for w in (2, 4, 8, 16)]
    worth = zip(Reuse, configs, strict=False)
    rows = [
        tuned(SHAPE, configs[6], Origin.PREDICTED),
        tuned(shape_like(2048), configs[5]),
        *reversed([tuned(SHAPE, own, Origin.BORROWED, reuse) for reuse, own in worth]),
    ]
    assert offered(rows) == [*zip(WITHOUT_TIMES[:7], configs, strict=False), (Rung.DEFAULT, DEFAULT)]


def test_a_strict_caller_gets_exact_measurements_or_none() -> None:
    rows = [tuned(SHAPE, config(64)), tuned(SHAPE, config(128), Origin.BORROWED, Reuse.OTHER_DRIVER)]
    for given, expected in ((rows, [config(64)]), (rows[1:], [])):
        found = list(climb_down(ConfigTable(given), SHAPE, H200.limits, strict=True))
        assert [step.config for step in found if isinstance(step, Candidate)] == expected
        assert isinstance(found[-1], Rejection)
        assert "strict" in found[-1].reason


def test_of_equally_near_neighbours_the_one_of_the_nearer_software_comes_first() -> None:
    near = [
        tuned(shape_like(2048), config(m, w), Origin.BORROWED, reuse)
        for (m, w), reuse in zip([(64, 4), (64, 8), (128, 4), (128, 8)], reversed(Reuse), strict=False)
    ]
    assert [found for rung, found in offered(near) if rung is Rung.NEAREST] == [row.config for row in reversed(near)]


def test_a_near_shape_of_another_driver_comes_before_a_far_one_of_this() -> None:
    rows = [tuned(shape_like(16 * 2048), config(64)), tuned(shape_like(2048), config(128), Origin.BORROWED)]
    assert offered(rows, shape_like(4096))[0] == (Rung.NEAREST, config(128))


def test_a_neighbour_is_borrowed_and_says_from_where() -> None:
    neighbour = shape_like(2048)
    nearest = next(step for step in steps([tuned(neighbour, config())]) if isinstance(step, Candidate))
    assert (nearest.rung, nearest.origin, nearest.tuned_for) == (Rung.NEAREST, Origin.BORROWED, neighbour)
    assert explain_candidate(nearest, SHAPE).reason == f"measured on this device for {neighbour.label}"
    borrowed = dataclasses.replace(nearest, reuse=Reuse.SAME_CAPABILITY)
    assert explain_candidate(borrowed, SHAPE).reason.startswith("measured elsewhere, on a device of this compute")


@pytest.mark.parametrize(
    ("near", "far"),
    [
        (shape_like(2048), shape_like(4096)),
        (shape_like(512), shape_like(256)),
        (shape_like(2048), shape_like(1024, causal=Causal.UPPER_LEFT)),
        (shape_like(1024, causal=Causal.UPPER_LEFT), shape_like(4096)),
        (shape_like(1024, batch=2), shape_like(1024, batch=64)),
        (shape_like(1024, batch=2), shape_like(1024, num_heads_kv=1)),
    ],
)
def test_the_nearer_neighbour_comes_first(near: AttentionShape, far: AttentionShape) -> None:
    assert distance(near, SHAPE) < distance(far, SHAPE)
    rows = [tuned(far, config(64)), tuned(near, config(128))]
    assert offered(rows)[0] == (Rung.NEAREST, config(128))


def test_distance_is_zero_only_for_the_same_shape_and_symmetric() -> None:
    other = shape_like(64, causal=Causal.LOWER_RIGHT, num_heads_kv=2)
    assert distance(SHAPE, SHAPE) == 0
    assert distance(other, SHAPE) == distance(SHAPE, other) > 0


@pytest.mark.parametrize(
    "stranger",
    [
        shape_like(1024, head_dim=128),
        shape_like(1024, head_dim_v=32),
        shape_like(1024, dtype="bfloat16"),
        shape_like(16 * 1024),
    ],
)
def test_what_is_too_different_is_no_neighbour(stranger: AttentionShape) -> None:
    assert [rung for rung, _ in offered([tuned(stranger, config())])] == [Rung.DEFAULT]


def test_half_precision_types_are_neighbours() -> None:
    shape, neighbour = shape_like(dtype="bfloat16"), shape_like(dtype="float16")
    assert offered([tuned(neighbour, config())], shape)[0] == (Rung.NEAREST, config())


def test_a_rung_tries_few_neighbours() -> None:
    rows = [tuned(shape_like(1024 + 16 * i), config()) for i in range(1, 50)]
    assert [rung for rung, _ in offered(rows)].count(Rung.NEAREST) == MAX_NEIGHBOURS


def test_what_does_not_fit_this_device_is_passed_over_with_its_reason() -> None:
    rejection, *_ = steps([tuned(SHAPE, config(1024))])
    assert isinstance(rejection, Rejection)
    assert rejection.rung is Rung.EXACT
    assert "shared memory" in rejection.reason


def test_a_rule_that_chokes_on_a_stored_config_costs_the_config_only(
    kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choke(wanted: KernelConfig, *_: object) -> tuple[str, ...]:
        if wanted != DEFAULT:
            raise ZeroDivisionError("by a stored zero")
        return ()

    monkeypatch.setattr(kernel, "rule_violations", choke)
    assert offered([tuned(SHAPE, config())]) == [(Rung.DEFAULT, DEFAULT)]


def test_of_two_rows_for_one_shape_the_first_layer_wins() -> None:
    rows = [tuned(SHAPE, config(128)), tuned(SHAPE, config(64))]
    assert offered(rows)[0] == (Rung.EXACT, config(128))
    assert len(ConfigTable(rows)) == 1


def test_a_shape_that_no_kernel_computes_has_no_candidate() -> None:
    wide = shape_like(head_dim=256)
    assert offered([], wide) == []
    assert steps([], wide)[-1] == Rejection(Rung.DEFAULT, "no kernel computes this shape on this device")


def test_what_several_machines_agree_on_is_taken_as_such_and_never_as_measured_here() -> None:
    row = tuned(SHAPE, config(64, 4), Origin.COMMUNITY, Reuse.OTHER_COMPILER)
    first = next(step for step in steps([row]) if isinstance(step, Candidate))
    explained = explain_candidate(first, SHAPE)
    assert (first.rung, first.origin, explained.is_measured_here) == (Rung.OTHER_COMPILER, Origin.COMMUNITY, False)
    assert "measured by several machines with this kind of GPU for this shape" in explained.reason
