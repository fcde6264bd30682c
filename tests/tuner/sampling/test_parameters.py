"""Configs as points of a study, those of autotuned kernels included, which may leave parameters out."""

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution

from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.candidates.space import ConfigSpace
from blocktune.tuner.sampling.parameters import Parameters

pytestmark = pytest.mark.triton_free

CONFIGS = tuple(
    LaunchConfig("m:f", values)
    for values in (
        (("BLOCK", 64), ("EVEN", True), ("num_stages", 2)),
        (("BLOCK", 128), ("EVEN", False), ("num_stages", 3), ("maxnreg", 128)),
        (("BLOCK", 512), ("EVEN", True), ("num_stages", 4)),
    )
)


def test_every_config_is_a_point_and_back() -> None:
    parameters = Parameters(ConfigSpace(feasible=CONFIGS))
    assert [parameters.config(parameters.point(config)) for config in CONFIGS] == list(CONFIGS)


def test_a_parameter_that_some_configs_leave_out_may_be_none() -> None:
    parameters = Parameters(ConfigSpace(feasible=CONFIGS))
    assert parameters.distributions["maxnreg"] == CategoricalDistribution((128, None))
    assert parameters.point(CONFIGS[0])["maxnreg"] is None


def test_numbers_are_a_range_where_they_are_evenly_spaced_and_switches_are_no_numbers() -> None:
    found = Parameters(ConfigSpace(feasible=CONFIGS)).distributions
    assert found["num_stages"] == IntDistribution(2, 4, step=1)
    assert found["BLOCK"] == CategoricalDistribution((64, 128, 512))
    assert found["EVEN"] == CategoricalDistribution((False, True))
