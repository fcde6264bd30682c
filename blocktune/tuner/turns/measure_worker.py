"""The child process that measures where a crash must not cost more than a config.

`python -m blocktune.tuner.turns.measure_worker PARENT`. Each line on standard input is a command and each line on
standard output its answer, one JSON object per line. What kernels print goes to standard error.

    {"kernel": "module:function", "source_hash": "…", "folder": "…", "arguments": {…}, "grids": […], "l2": "cold",
     "device": 0}
    {"configs": [{…}, …], "count": 3}        {"samples_us": [[…] or null, …], "failures": ["" or "why", …]}
                                             or {"machine": "why"}, if no config is to blame
"""

import json
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch

from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.tuned.call import Call, jitted_function
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.tuned.settings import Cache, Settings
from blocktune.kernels.tuned.triton_config import triton_config, user_config
from blocktune.tuner.compile.answers import is_of_the_machine, private_stdout, send
from blocktune.tuner.compile.worker import die_with_parent
from blocktune.tuner.measure.clock import Clock, CudaClock
from blocktune.tuner.turns.arguments import load_arguments
from blocktune.tuner.turns.launches import OwnLaunches

MakeClock = Callable[[Cache], Clock]


def serve(make_clock: MakeClock, commands: TextIO, answers: TextIO) -> None:
    """Answer commands until they end; the first one says what is measured."""
    subject = json.loads(next(commands))
    if subject["device"] is not None:  # the caller's, to which the tensors go and on which launches run
        torch.cuda.set_device(subject["device"])
    call = _call(subject)
    launches = OwnLaunches(call, lambda: make_clock(subject["l2"]))
    send(answers, {"ready": True})
    for line in commands:
        send(answers, answer_to(json.loads(line), launches))


def answer_to(command: Mapping[str, Any], launches: OwnLaunches) -> dict[str, Any]:
    """Return how the launches of a command ended.

    Raises:
        Exception: what one of them raised that neither its config nor the machine is to blame for.
    """
    configs = [UserConfig.from_json(config) for config in command["configs"]]
    try:
        timed = launches.rounds(configs, command["count"])
    except Exception as error:
        if not is_of_the_machine(error):
            raise
        return {"machine": f"{type(error).__name__}: {error}"}
    samples = [list(timed[config]) if config in timed else None for config in configs]
    return {"samples_us": samples, "failures": [launches.failures.get(config, "") for config in configs]}


def _call(subject: Mapping[str, Any]) -> Call:
    """Return the call that is measured, with copies of its arguments.

    Raises:
        RuntimeError: another source is found under the kernel's name.
    """
    tuner = tuner_named(subject["kernel"])
    function = jitted_function(tuner.fn)
    if hash_of_sources(function) != subject["source_hash"]:
        raise RuntimeError(f"{subject['kernel']} is another function here; is it saved as it runs?")
    args, kwargs = load_arguments(subject["arguments"], Path(subject["folder"]))
    own = {user_config(subject["kernel"], config): config for config in tuner.configs}
    configs = [UserConfig.from_json(config) for config in subject["configs"]]
    return Call(
        tuner=tuner,
        function=function,
        name=subject["kernel"],
        source_hash=subject["source_hash"],
        problem=Problem(()),
        configs={config: own.get(config) or triton_config(config) for config in configs},
        args=args,
        kwargs=kwargs | {"grid": _grid(subject["grids"]), "warmup": False},
        settings=Settings(l2=subject["l2"]),
    )


def tuner_named(name: str) -> Any:
    """Return Triton's tuner around the kernel with this name, `module:qualified.name`."""
    from triton.runtime.autotuner import Autotuner

    module, _, path = name.partition(":")
    found = reduce(getattr, path.split("."), import_module(module))
    while not isinstance(found, Autotuner):
        found = found.fn
    return found


def _grid(grids: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Return the grid as the caller's function would give it, from a table by the constants of the configs."""
    names = grids["names"]
    table = {tuple(values): tuple(grid) for values, grid in grids["rows"]}
    return lambda meta: table[tuple(meta.get(name) for name in names)]


def main(arguments: list[str], make_clock: MakeClock = CudaClock) -> None:
    (parent,) = arguments
    die_with_parent(int(parent))
    answers = private_stdout()
    serve(make_clock, sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
