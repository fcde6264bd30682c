"""Buckets of neighbouring shapes: the bound holds on every shape, and there are as few as there can be."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktune.db.records.records import Best, Environment, Outcome, Trial
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import Causal
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.upkeep.shape_buckets import choose_buckets

pytestmark = pytest.mark.triton_free

DEVICE = device_named("h200")
ENVIRONMENT = Environment(triton="3.6.0", ptxas="12.8", torch="2.11")
HASH = get_kernel("flash_fwd").source_hash
CONFIGS = tuple(KernelConfig("flash_fwd", m, n, 4, 2) for m, n in ((64, 64), (128, 64), (128, 128), (256, 64)))


def measured(length: int, times: dict[int, float], **changes: object) -> tuple[Best, list[Trial]]:
    """A shape whose configs took these times; the fastest won."""
    common = {
        "device": DEVICE,
        "environment": ENVIRONMENT,
        "shape": replace(complete_shape(length, 64), **changes),
        "kernel_hash": HASH,
    }
    trials = [
        Trial(config=CONFIGS[index], outcome=Outcome.OK, time_us=time, relative_to_anchor=time / 100, **common)
        for index, time in times.items()
    ]
    fastest = min(times, key=times.__getitem__)
    best = Best(config=CONFIGS[fastest], origin=Origin.MEASURED, time_us=times[fastest], **common)
    return best, trials


def gathered(shapes: Iterable[tuple[Best, list[Trial]]]) -> tuple[list[Best], list[Trial]]:
    bests, trials = zip(*shapes, strict=True)
    return list(bests), [trial for each in trials for trial in each]


def test_neighbours_share_a_config_within_the_bound() -> None:
    bests, trials = gathered(
        [
            measured(512, {0: 100.0, 1: 102.0, 2: 130.0}),
            measured(1024, {0: 101.0, 1: 100.0, 2: 120.0}),
            measured(2048, {0: 115.0, 1: 102.5, 2: 100.0}),
            measured(4096, {0: 150.0, 1: 110.0, 2: 100.0}),
        ]
    )
    buckets = choose_buckets(bests[::-1], trials)
    assert [[member.best.shape.seqlen_q for member in each.members] for each in buckets] == [[512, 1024, 2048], [4096]]
    first, second = buckets
    assert first.config == CONFIGS[1]
    assert [round(member.loss, 6) for member in first.members] == [0.02, 0.0, 0.025]
    assert first.largest_loss == pytest.approx(0.025)
    assert (second.config, second.largest_loss) == (CONFIGS[2], 0.0)
    changed = first.merge_winners()
    assert [(best.shape.seqlen_q, best.config, best.time_us) for best in changed] == [
        (512, CONFIGS[1], 102.0),
        (2048, CONFIGS[1], 102.5),
    ]
    assert {best.speedup_over_default for best in changed} == {None}


def test_without_evidence_nothing_is_merged() -> None:
    near = measured(1024, {1: 100.0})
    cases = {
        "never timed there": measured(512, {2: 100.0}),
        "other software": replaced(measured(512, {0: 100.0, 1: 100.5}), environment=replace(ENVIRONMENT, driver="1")),
        "older source": replaced(measured(512, {0: 100.0, 1: 100.5}), kernel_hash="f" * 16),
        "other mask": measured(512, {0: 100.0, 1: 100.5}, causal=Causal.UPPER_LEFT),
        "other device": replaced(measured(512, {0: 100.0, 1: 100.5}), device=device_named("h100-sxm")),
    }
    for case, other in cases.items():
        bests, trials = gathered([other, near])
        if case in ("other software", "older source"):
            bests[0] = replace(bests[0], environment=ENVIRONMENT, kernel_hash=HASH)
        assert len(choose_buckets(bests, trials)) == 2, case
    bests, trials = gathered([measured(512, {0: 100.0, 1: 100.5}), near])
    assert len(choose_buckets(bests, trials)) == 1
    assert choose_buckets([replace(best, origin=Origin.PREDICTED) for best in bests], trials) == []


def replaced(shape: tuple[Best, list[Trial]], **changes: object) -> tuple[Best, list[Trial]]:
    best, trials = shape
    return replace(best, **changes), [replace(trial, **changes) for trial in trials]


@settings(max_examples=60, deadline=None)
@given(
    table=st.lists(
        st.dictionaries(st.integers(0, 3), st.integers(100, 110).map(float), min_size=1), min_size=1, max_size=6
    ),
    max_loss=st.sampled_from([0.0, 0.03, 0.05]),
)
def test_the_bound_holds_and_fewer_buckets_are_impossible(table: list[dict[int, float]], max_loss: float) -> None:
    bests, trials = gathered(measured(128 << index, times) for index, times in enumerate(table))
    buckets = choose_buckets(bests, trials, max_loss=max_loss)
    assert [member.best for bucket in buckets for member in bucket.members] == bests
    for bucket in buckets:
        for member in bucket.members:
            times = table[bests.index(member.best)]
            assert times[CONFIGS.index(bucket.config)] <= (1 + max_loss) * min(times.values()) * (1 + 1e-12)
    assert len(buckets) == fewest(table, max_loss)


def fewest(table: list[dict[int, float]], max_loss: float) -> int:
    """The least number of runs with a common config, by trying every way to cut."""

    def is_bucket(run: list[dict[int, float]]) -> bool:
        fine = [
            {index for index, time in times.items() if time / min(times.values()) - 1.0 <= max_loss} for times in run
        ]
        return bool(set.intersection(*fine))

    for cuts in range(len(table)):
        for places in itertools.combinations(range(1, len(table)), cuts):
            edges = [0, *places, len(table)]
            if all(is_bucket(table[start:end]) for start, end in itertools.pairwise(edges)):
                return cuts + 1
    raise AssertionError("every shape is a bucket of its own")
