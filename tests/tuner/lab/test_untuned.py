"""What untuned shapes get, judged by sweeps that are left out: what is known of others, and of others alone."""

import dataclasses
import math
from collections.abc import Callable

import pytest

from blocktune.db.records.records import Environment, Outcome, Trial
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.lab.measured_shapes import promising, recorded_best, recorded_sweep
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.lab.untuned import UntunedStudy, Without, summary

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")
KERNEL = get_kernel("flash_fwd_hopper")
ENVIRONMENT = Environment(triton="3.6.0", ptxas="12.8", torch="2.11", driver="580.65.06")
LENGTHS = (3000, 4096, 6000, 8192)


def shape_of(seqlen: int) -> AttentionShape:
    return AttentionShape(
        batch=2, num_heads=16, num_heads_kv=16, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=128, head_dim_v=128
    )


def sweep(seqlen: int, factor: Callable[[KernelConfig], float] = lambda config: 1.0) -> Sweep:
    """Every config of the Hopper kernel, as fast as the model says times a factor."""
    shape = shape_of(seqlen)
    space = SearchSpace.build(shape, H200.limits, (KERNEL,)).feasible
    times = {config: usefulness(KERNEL, config, shape, H200) * factor(config) for config in space}
    anchor = times[KERNEL.default_config(shape, H200.limits)]
    trials = [
        Trial(
            device=H200,
            environment=ENVIRONMENT,
            shape=shape,
            config=config,
            kernel_hash=KERNEL.source_hash,
            outcome=Outcome.OK,
            time_us=time_us,
            relative_to_anchor=time_us / anchor,
            samples_us=(time_us,) * 5,
        )
        for config, time_us in times.items()
        if math.isfinite(time_us)
    ]
    return Sweep(device=H200, environment=ENVIRONMENT, shape=shape, trials=tuple(trials))


def hidden(config: KernelConfig) -> float:
    """What the model does not know: `keep_p` is worth a tenth, and every tile but the default's costs a fifth."""
    usual = KERNEL.default_config(shape_of(4096), H200.limits)
    tile = 1.0 if (config.block_m, config.block_n) == (usual.block_m, usual.block_n) else 3.0
    return tile * (0.9 if config.parameters["keep_p"] else 1.0)


def test_a_sweep_is_told_by_ratios_over_the_default() -> None:
    recorded = recorded_sweep(sweep(4096, hidden))
    assert recorded is not None
    assert recorded.first == KERNEL.name == kernels_for(shape_of(4096), H200.limits)[0].name
    assert not recorded.is_older(KERNEL.name)
    assert recorded.hashes == {KERNEL.name: KERNEL.source_hash}
    default = KERNEL.default_config(shape_of(4096), H200.limits)
    kept = tuple((default.parameters | {"keep_p": 1}).items())
    ratio = recorded.configs[KERNEL.name][kept]
    assert ratio.measured - ratio.predicted == pytest.approx(math.log(0.9), abs=1e-6)


def test_only_what_is_near_the_best_somewhere_is_kept() -> None:
    one = recorded_sweep(sweep(4096, hidden))
    assert one is not None
    (kept,) = promising([one])
    configs = kept.configs[KERNEL.name]
    assert 0 < len(configs) < len(one.configs[KERNEL.name]) / 2
    best = min(ratio.measured for ratio in one.configs[KERNEL.name].values())
    assert best == min(ratio.measured for ratio in configs.values())


def test_what_other_shapes_show_is_taken_for_the_shape_left_out() -> None:
    study = UntunedStudy([sweep(seqlen, hidden) for seqlen in LENGTHS])
    cases = list(study.cases(Without.SHAPE))
    assert [case.shape.seqlen_q for case in cases] == list(LENGTHS)
    assert all(case.config.parameters["keep_p"] == 1 for case in cases)
    assert all(case.expected < 1.05 < case.default for case in cases)
    numbers = summary(cases, "expected")
    assert numbers["worst"] == max(case.expected for case in cases)
    assert numbers["decoding"] is None


def test_without_its_family_nothing_is_known_and_the_default_is_taken() -> None:
    study = UntunedStudy([sweep(seqlen, hidden) for seqlen in LENGTHS[:2]])
    for case in study.cases(Without.FAMILY):
        assert case.config == KERNEL.default_config(case.shape, H200.limits)
        assert case.expected == case.default


def test_the_left_out_shape_itself_is_not_known() -> None:
    ordinary = [sweep(seqlen) for seqlen in LENGTHS[:3]]
    odd = sweep(LENGTHS[3], hidden)
    alone = list(UntunedStudy([*ordinary, sweep(LENGTHS[3])]).cases(Without.SHAPE))[-1]
    case = list(UntunedStudy([*ordinary, odd]).cases(Without.SHAPE))[-1]
    assert case.config == alone.config


def test_a_kernel_that_a_sweep_does_not_hold_is_no_choice_there() -> None:
    """It came later than the sweep, which cannot judge it."""
    one = sweep(4096)
    without = dataclasses.replace(one, shape=dataclasses.replace(one.shape, seqlen_q=700, seqlen_k=700))
    assert kernels_for(without.shape, H200.limits)[0].name != KERNEL.name
    (case,) = UntunedStudy([without]).cases(Without.SHAPE)
    assert (case.config.kernel, case.passed_over) == (KERNEL.name, 0)


def test_a_winner_says_how_much_faster_than_the_default_it_is(winner_like: Callable[..., object]) -> None:
    recorded = recorded_best(winner_like(1.1))
    assert recorded is not None
    ((_, ratio),) = recorded.configs[KERNEL.name].items()
    assert ratio.measured == pytest.approx(-math.log(1.1))
    assert recorded_best(winner_like(None)) is None


@pytest.fixture
def winner_like() -> Callable[..., object]:
    from blocktune.db.records.records import Best
    from blocktune.kernels.values.config import Origin

    def made(speedup: float | None) -> Best:
        shape = shape_of(4096)
        default = KERNEL.default_config(shape, H200.limits)
        return Best(
            device=H200,
            environment=ENVIRONMENT,
            shape=shape,
            config=KernelConfig.of(KERNEL.name, default.parameters | {"keep_p": 1 - default.parameters["keep_p"]}),
            kernel_hash=KERNEL.source_hash,
            origin=Origin.MEASURED,
            default=default,
            paper=None,
            time_us=400.0,
            default_time_us=440.0,
            speedup_over_default=speedup,
            trials=64,
        )

    return made
