"""The child process that compiles ahead of a job: `python -m blocktune.tuner.fleet.ahead_worker PARENT`.

It needs no GPU. PARENT is the parent's process id. One line on standard input says what to compile, and one line of
answer how many configs did; the code is then in the folder, as tuner/compile/shipped_code.py has it, of which the
environment has made `triton` Triton's cache.

    {"job": {…}, "most": 48, "part": 0, "parts": 6, "folder": "…"}  {"compiled": 7}
"""

import json
import os
import sys
from pathlib import Path

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import competing, get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UnknownDeviceError
from blocktune.tuner.candidates.starting_configs import favourites
from blocktune.tuner.compile.answers import private_stdout, send
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.shipped_code import RESULTS
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.drop_in.request import LaunchRequest
from blocktune.tuner.fleet.job import Job
from blocktune.tuner.fleet.worker import watch_parent

NICENESS = 10
"""Searches on the same node go first: their processors keep a GPU at work."""


def candidates(job: Job, most: int) -> list[KernelConfig]:
    """Return the configs that a search of the job is expected to try first, the first of all first; none where the
    catalogue does not know the device, or no config can run, or a call of an autotuned kernel cannot be made here."""
    if isinstance(job.shape, LaunchRequest):
        return []
    try:
        device = device_named(job.device.split("|")[0])
    except UnknownDeviceError:
        return []
    kernels = competing() if job.kernels is None else [get_kernel(name) for name in job.kernels]
    return favourites(job.shape, device, kernels, most, job.seed)


def compile_into(folder: Path, job: Job, configs: list[KernelConfig]) -> int:
    """Compile configs of a job, one after the other, and return how many have code now."""
    shape = job.shape
    if isinstance(shape, LaunchRequest):
        return 0
    cc = device_named(job.device.split("|")[0]).limits.cc if configs else (0, 0)
    with CompileFarm(workers=1, cache=ResourceCache(folder / RESULTS)) as farm:
        compiles = [farm.submit(config.kernel, config, shape, cc) for config in configs]
        return sum(compile.result().resources is not None for compile in compiles)


def main(arguments: list[str]) -> None:
    watch_parent(int(arguments[0]))
    os.nice(NICENESS)
    answers = private_stdout()
    asked = json.loads(sys.stdin.readline())
    job = Job.from_json(asked["job"])
    configs = candidates(job, asked["most"])[asked["part"] :: asked["parts"]]
    compiled = compile_into(Path(asked["folder"]), job, configs)
    send(answers, {"compiled": compiled})


if __name__ == "__main__":
    main(sys.argv[1:])
