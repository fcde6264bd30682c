"""Every place that predicts the time of a compiled config gives one number, on every compute capability."""

import json
from concurrent.futures import Future
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.db.store import ResultStore
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware import device
from blocktune.kernels.hardware.device import DeviceSpec, catalogue, device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.dispatch.dispatcher import best_config
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.cost.roofline import missing_rates
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from blocktune.tuner.report.trial_columns import trial_columns

RATED = {entry.cc: spec for entry in catalogue() if not missing_rates(spec := device_named(entry.id))}
"""One of every compute capability but 12.1, whose only device lacks a rate."""
SHAPE = complete_shape(1024, 64, seq_k=2048, dtype="fp16", causal="lower_right")
"""A shape of which PyTorch has no kernel, so that the dispatcher takes what was predicted."""
WORDS = ("--seq", 1024, "--seq-k", 2048, "--dim", 64, "--dtype", "fp16", "--causal-lower-right", "--json")


def resources_of(kernel: AttentionKernel, config: KernelConfig, spec: DeviceSpec) -> KernelResources:
    warps = kernel.total_warps(config)
    return KernelResources(
        registers=1920 // max(16, warps), shared_bytes=20_000, num_warps=warps, tensor_cores=spec.limits.mma
    )


@pytest.fixture(params=RATED.values(), ids=lambda spec: spec.limits.name)
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceSpec:
    """A device whose code is made up, the same for whoever asks for a config; nothing ships."""
    found: DeviceSpec = request.param

    def submit(farm: Any, name: str, config: KernelConfig, shape: AttentionShape, cc: object) -> Future[CompileResult]:
        del farm, cc, shape
        future: Future[CompileResult] = Future()
        shared = SharedAccesses(loads=10, load_wavefronts=40 * config.block_m, load_excess=43)
        resources = resources_of(get_kernel(name), config, found)
        future.set_result(CompileResult(config=config, outcome=Outcome.OK, resources=resources, shared=shared))
        return future

    monkeypatch.setattr(CompileFarm, "submit", submit)
    monkeypatch.setattr(CompileFarm, "start", lambda farm: None)
    monkeypatch.setattr(device, "present_devices", tuple)
    monkeypatch.setattr("blocktune.runtime.store_reader.sources.shipped_rows", lambda: iter(()))
    monkeypatch.setattr("blocktune.runtime.selection.untuned.shipped_correction", lambda key: None)
    monkeypatch.setattr("blocktune.cli.shared.lookup.shipped_winners", lambda: iter(()))
    return found


@pytest.mark.few(4)
def test_run_explain_ladder_report_and_dispatcher_agree(
    tune, spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*WORDS, "--device", spec.name)
    ran = tune("run", *words, "--trials", 4, "--kernel", "flash_fwd")
    assert ran.exit_code == 0, ran.stderr
    best = json.loads(ran.stdout)["best"]
    explained = json.loads(tune("explain", *words).stdout)
    assert explained["config"] == best["config"]
    assert explained["prediction"]["total_us"] == best["predicted_us"]
    steps = json.loads(tune("ladder", *words).stdout)["steps"]
    assert {step["predicted_us"] for step in steps if step["config"] == best["config"]} == {best["predicted_us"]}
    assert json.loads(tune("best", *words).stdout)["best"]["predicted_us"] == best["predicted_us"]
    monkeypatch.setenv("BLOCKTUNE_DB", str(tune.db))
    assert best_config(SHAPE, spec).config == KernelConfig.from_json(best["config"])
    with ResultStore.open(tune.db) as store:
        trials = store.trials(spec, SHAPE)
    sweep = Sweep(device=spec, environment=trials[0].environment, shape=SHAPE, trials=tuple(trials))
    columns = trial_columns(sweep, trials)
    assert columns["total_us"] == [pytest.approx(trial.predicted_us, rel=1e-3) for trial in trials]


def test_no_time_leaves_out_the_conflicts_of_plain_products() -> None:
    plain = KernelResources(registers=64, shared_bytes=0, num_warps=4, tensor_cores="none")
    with pytest.raises(UsageError, match="`shared` must be given where products run without tensor cores"):
        CompiledCode(plain, None)
    assert CompiledCode.recorded(plain) is None
