"""A winner and trials of a real kernel, for programs that fill stores."""

from dataclasses import replace

from blocktune.db.records.records import Best, Environment, Outcome, Trial
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import Origin
from blocktune.tuner.candidates.shape_defaults import complete_shape


def winner() -> Best:
    kernel, device, shape = get_kernel("flash_fwd"), device_named("h200"), complete_shape(8192, 64)
    return Best(
        device=device,
        environment=Environment(triton="3.6.0", ptxas="12.8.93", torch="2.13.0"),
        shape=shape,
        config=kernel.default_config(shape, device.limits),
        kernel_hash=kernel.source_hash,
        origin=Origin.MEASURED,
        time_us=100.0,
    )


def sample_trials(count: int) -> list[Trial]:
    best = winner()
    trial = Trial(
        device=best.device,
        environment=best.environment,
        shape=best.shape,
        config=best.config,
        kernel_hash=best.kernel_hash,
        outcome=Outcome.OK,
        time_us=100.0,
        samples_us=(99.0, 100.0, 101.0),
    )
    return [replace(trial, config=replace(trial.config, extra=(("n", -number - 1),))) for number in range(count)]
