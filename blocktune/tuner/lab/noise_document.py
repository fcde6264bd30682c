"""A study of a GPU's noise as the document that is kept of it."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from blocktune.db.records.records import Regime
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.lab import noise
from blocktune.tuner.lab.noise_report import columns, summarize
from blocktune.tuner.measure import environment, runner, telemetry
from blocktune.tuner.measure.device_choice import visible
from blocktune.tuner.measure.measurement import Terms

NOISE_FORMAT, NOISE_SCHEMA = "blocktune-noise", 1


def noise_document(
    shape: AttentionShape,
    device: DeviceSpec,
    configs: tuple[KernelConfig, ...],
    seconds: float,
    *,
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return the document of a study of this many seconds on a GPU that the caller has locked.

    Args:
        shape: what the configs compute.
        device: the GPU.
        configs: the one that is studied, then those that may be studied with it.
        seconds: wall time.
        on_progress: called with what comes next.

    Raises:
        NoFeasibleConfigError: the config that is studied does not run.
    """
    monitor = telemetry.GpuMonitor(device.uuid, own_processes=len(Regime))
    study = _measured_study(shape, device, configs, seconds, monitor, on_progress)
    return {
        "format": NOISE_FORMAT,
        "schema": NOISE_SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": environment.source_commit(),
        "device": device.name,
        "environment": environment.measuring_environment(device, monitor).to_json(),
        "shape": shape.to_json() | {"label": shape.label},
        "configs": [config.to_json() | {"label": config.label} for config in study.configs],
        "seconds": round(study.seconds, 1),
        "summary": summarize(study),
        "measurements": columns(study),
    }


def _measured_study(
    shape: AttentionShape,
    device: DeviceSpec,
    configs: tuple[KernelConfig, ...],
    seconds: float,
    monitor: telemetry.GpuMonitor,
    on_progress: Callable[[str], None],
) -> noise.Study:
    """Measure the configs under both regimes, in processes of their own."""
    runners = {
        regime: runner.GpuRunner(
            shape, environment=visible(device), monitor=monitor, terms=Terms(regime=regime, race=False)
        )
        for regime in (Regime.SUSTAINED, Regime.BURST)
    }
    try:
        return noise.study_noise(runners, configs, seconds=seconds, on_progress=on_progress)
    finally:
        for each in runners.values():
            each.close()
