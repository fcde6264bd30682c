"""Preparation of a job by its worker: it may refuse it, and it keeps the configs that killed other workers."""

from blocktune.db.records.records import Environment, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.fleet.job import Job
from blocktune.tuner.measure.environment import measuring_environment
from blocktune.tuner.measure.protocol import DEFAULT_REGIME
from blocktune.tuner.measure.telemetry import GpuMonitor
from blocktune.tuner.subject.launch import LaunchSubject

DIED = "a worker died while it measured this config"

SOFTWARE = ("triton", "ptxas", "torch", "cuda", "driver")
"""What of an environment may be excluded."""


class RefusedError(BlocktuneError):
    """A worker's software is excluded, so another node makes the job."""


def prepare(job: Job, device: DeviceSpec, store: ResultStore) -> None:
    """Make a store ready for the search of a job on this device.

    Raises:
        RefusedError: the software here is excluded.
    """
    if not (job.excluded or job.lethal):
        return
    monitor = GpuMonitor(device.uuid, own_processes=1)
    environment = measuring_environment(device, monitor, job.regime or DEFAULT_REGIME)
    require_welcome(job.excluded, environment)
    keep_lethal(job, device, environment, store)


def require_exclusion(text: str) -> None:
    """Check a text such as `driver=550.54`.

    Raises:
        UsageError: it names no software, or no version.
    """
    name, _, version = text.partition("=")
    if name not in SOFTWARE or not version:
        raise UsageError(
            f"`--exclude` must be NAME=VERSION with one of the names {', '.join(SOFTWARE)}, but got {text!r:.80}. "
            "For example: --exclude triton=3.5"
        )


def require_welcome(excluded: tuple[str, ...], environment: Environment) -> None:
    """Check that nothing here is excluded. A version stands for all that begin with it: 3.5 for 3.5.1, not for 3.50.

    Raises:
        RefusedError: something is.
    """
    for text in excluded:
        name, _, version = text.partition("=")
        here = getattr(environment, name)
        if f"{here}.".startswith(f"{version}."):
            raise RefusedError(f"{name} {version} is excluded, but here is {name} {here}.")


def keep_lethal(job: Job, device: DeviceSpec, environment: Environment, store: ResultStore) -> None:
    """Store the configs of a shape that killed workers as errors, so that they are not tried again."""
    if not isinstance(job.shape, AttentionShape):
        return
    trials = [
        Trial(
            device=device,
            environment=environment,
            shape=job.shape,
            config=config,
            kernel_hash=get_kernel(config.kernel).source_hash,
            outcome=Outcome.RUN_ERROR,
            error=DIED,
        )
        for config in job.lethal
        if isinstance(config, KernelConfig)
    ]
    if trials:
        store.put_all(trials, ())


def keep_lethal_launches(job: Job, call: AutotunedCall, device: DeviceSpec, store: ResultStore) -> None:
    """Store the configs of a call that killed workers as errors, as `keep_lethal` does those of a shape."""
    lethal = [config for config in job.lethal if isinstance(config, LaunchConfig)]
    if lethal:
        environment = measuring_environment(device, GpuMonitor(device.uuid, own_processes=1), job.options.terms.regime)
        subject = LaunchSubject.of(call, device, environment)
        store.put_all([subject.trial(config, Outcome.RUN_ERROR, error=DIED) for config in lethal], ())
