"""A call as a subject: its list is the space, its first config the default, and `costs` its only model."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.db.records.records import Environment, KernelTrial, Outcome
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.subject.launch import LaunchSubject
from tests.support.fakes.fake_call import FIRST, OTHER, THIRD, fake_call

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")
ENVIRONMENT = Environment(triton="3.6.0", ptxas="12.8", torch="2.11")
FITTING = KernelResources(registers=64, shared_bytes=0, num_warps=4, tensor_cores="none")


def compiled(config: LaunchConfig) -> CompileResult[LaunchConfig]:
    return CompileResult(config=config, outcome=Outcome.OK, resources=FITTING)


def subject_of(**settings: Any) -> LaunchSubject:
    call = fake_call(lambda *args, **options: None, x=torch.ones(4))
    return LaunchSubject.of(replace(call, settings=Settings(**settings)), H200, ENVIRONMENT)


def trial(subject: LaunchSubject, config: LaunchConfig, time_us: float | None, **fields: Any) -> KernelTrial:
    outcome = Outcome.RUN_ERROR if time_us is None else Outcome.OK
    return subject.trial(config, outcome, time_us=time_us, **fields)


def test_the_list_is_the_space_and_its_first_config_leads() -> None:
    contenders = subject_of().contenders
    assert contenders.space.feasible == (FIRST, OTHER)
    assert contenders.first == (FIRST,)
    assert contenders.paper is None


def test_without_costs_nothing_is_predicted_and_the_order_is_that_of_the_list() -> None:
    subject = subject_of()
    assert subject.predict(compiled(FIRST)) is None
    assert subject.assignment(2, seed=0).by_usefulness == [FIRST, OTHER]


def test_costs_are_a_roofline_over_the_share_of_the_device_that_blocks_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.tuner.subject.launch.meta_of", lambda call, options: dict(options))
    assert H200.memory_gbs is not None
    subject = subject_of(costs=lambda named: {"bytes": 50.0 * H200.memory_gbs * 1e3 * named["BLOCK"]})
    resident = subject.occupancy(FITTING).blocks_per_sm * H200.num_sms
    full, half = (
        replace(subject, call=replace(subject.call, kwargs={"grid": (n,)})) for n in (resident, resident // 2)
    )
    assert full.predict(compiled(FIRST)) == pytest.approx(50.0)
    assert full.predict(compiled(OTHER)) == pytest.approx(100.0)
    assert half.predict(compiled(FIRST)) == pytest.approx(100.0)
    assert subject.assignment(2, seed=0).by_usefulness == [FIRST, OTHER]
    tiny = subject_of(costs=lambda named: {"bytes": 1.0})
    assert tiny.usefulness(FIRST) == 1.0, "no launch is that short"


def test_configs_of_no_list_count_where_the_search_goes_beyond_it() -> None:
    assert subject_of().source_hash(THIRD) is None
    assert subject_of(expand=4).source_hash(THIRD) == "0"
    assert subject_of(expand=4).source_hash(LaunchConfig("other:f", THIRD.values)) is None


def test_a_config_that_spills_is_left_out_unless_it_is_the_default() -> None:
    subject = subject_of(max_spill_bytes=8)
    found = subject.occupancy(replace(FITTING, spill_bytes=16))
    assert subject.obstacle(OTHER, found) == "a thread spills 16 bytes, of which 8 are allowed (max_spill_bytes)"
    assert subject.obstacle(FIRST, found) is None
    huge = subject.occupancy(replace(FITTING, shared_bytes=1 << 20))
    assert subject.obstacle(FIRST, huge) == "not one block fits an SM: shared_memory"


def test_trials_of_a_race_without_an_anchor_are_compared_with_the_default() -> None:
    subject = subject_of()
    found = subject.comparable([trial(subject, FIRST, 100.0), trial(subject, OTHER, 50.0)])
    assert [each.relative_to_anchor for each in found] == [1.0, 0.5]
    failed = subject.comparable([trial(subject, FIRST, None), trial(subject, OTHER, 50.0)])
    assert [each.relative_to_anchor for each in failed] == [None, 1.0]
    paired = trial(subject, OTHER, 50.0, relative_to_anchor=0.7)
    assert subject.comparable([paired]) == (paired,)


def test_equal_code_launched_by_other_constants_is_another_launch() -> None:
    subject = subject_of()
    staged = LaunchConfig(FIRST.kernel, (*FIRST.values, ("num_stages", 4)))
    assert subject.launches_alike(FIRST, staged)
    assert not subject.launches_alike(FIRST, OTHER)
