"""The child process that makes jobs on one GPU: `python -m blocktune.tuner.fleet.worker PARENT`.

PARENT is the parent's process id. Each line on standard input is a job, as one JSON object; its progress and its
end follow on standard output. What kernels and compilers print goes to standard error, of which the parent reads the
end when this process dies. SIGINT ends a job early, and the process lives on.

    {job}      {"progress": {…}}* then {"report": {…}} or {"error": "…", "exit_code": 3} or {"refused": "…"}

A job that brings what is known is made without the run's store: {"records": {…}} follow, as they are kept.

What is wrong with a job is its answer. Whatever else is wrong, such as a GPU that is gone, ends the process, so that
another worker takes the job over.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.errors import BlocktuneError, NoDeviceError, NoFeasibleConfigError, StoreError, UsageError
from blocktune.tuner.compile.answers import private_stdout, send
from blocktune.tuner.compile_server.background import PreparingCompiler
from blocktune.tuner.drop_in.request import LaunchRequest
from blocktune.tuner.fleet.job import Job, progress_json
from blocktune.tuner.fleet.preparation import RefusedError, keep_lethal_launches, prepare
from blocktune.tuner.fleet.streamed_store import Send, store_of
from blocktune.tuner.measure.device_choice import choose_device, is_present
from blocktune.tuner.measure.worker import die_with_parent
from blocktune.tuner.search.report import OnProgress, TuningReport
from blocktune.tuner.search.run import farm_for
from blocktune.tuner.search.tune import tune
from blocktune.tuner.search.tune_launch import tune_launch

INTERRUPTED = 130

Make = Callable[[Job, ResultStore, OnProgress], TuningReport]


def serve(make: Make, jobs: TextIO, answers: TextIO) -> None:
    """Make jobs until the input ends."""
    for line in jobs:
        reply = partial(send, answers)
        reply(_make_job(make, Job.from_json(json.loads(line)), reply))


def _make_job(make: Make, job: Job, reply: Send) -> dict[str, Any]:
    """Make a job and return its end."""
    try:
        with store_of(job, reply) as store:
            report = make(job, store, lambda progress: reply({"progress": progress_json(progress)}))
        return {"report": report.to_json()}
    except RefusedError as error:
        return {"refused": str(error)}
    except (NoFeasibleConfigError, StoreError, UsageError) as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except KeyboardInterrupt:
        return {"error": "interrupted before anything was found", "exit_code": INTERRUPTED}


def make_job(
    device: DeviceSpec, compiler: PreparingCompiler, job: Job, store: ResultStore, tell: OnProgress
) -> TuningReport:
    """Tune the shape or the call of a job on this device.

    Raises:
        NoDeviceError: the job is for a GPU of another kind, or this machine has no GPU.
        RefusedError: the job excludes the software here.
    """
    if not is_present(device) or device.key != job.device:
        here = device.key if is_present(device) else "no GPU"
        raise NoDeviceError(f"The job is for the GPU {job.device}, but here is {here}. See `tune devices`.")
    prepare(job, device, store)
    if isinstance(job.shape, LaunchRequest):
        with job.shape.open_call() as call:
            keep_lethal_launches(job, call, device, store)
            return tune_launch(call, device, store, job.options, tell)
    return tune(
        job.shape,
        device=device,
        store=store,
        budget=job.budget,
        kernels=None if job.kernels is None else [get_kernel(name) for name in job.kernels],
        exhaustive=job.exhaustive,
        regime=job.regime,
        objective=job.objective,
        sampler=job.sampler,
        study=job.study,
        seed=job.seed,
        on_progress=tell,
        compiler=compiler,
    )


def watch_parent(parent: int) -> None:
    """End this process when the parent ends, and let SIGINT interrupt even where the parent's shell ignores it, or the
    parent, as Ray does, blocks it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent()
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(1)


def main(arguments: list[str]) -> None:
    watch_parent(int(arguments[0]))
    answers = private_stdout()
    device = choose_device()  # the only one that this process sees
    with farm_for(device) as compiler:
        try:
            serve(partial(make_job, device, compiler), sys.stdin, answers)
        except BlocktuneError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
