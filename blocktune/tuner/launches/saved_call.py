"""A call on its way to another process, which finds the kernel by its name and gets copies of the arguments."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import AutotunedCall, grid_arguments, jitted_function, tuner_in
from blocktune.runtime.autotuned.config import LaunchConfig, LaunchProblem, launch_config, triton_config
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.launches.arguments import load_arguments, save_arguments
from blocktune.tuner.offline.specialization import is_importable, object_named


class SavedCall:
    """Keeps the arguments of a call in a folder. document: describes the call, as JSON has it.

    Args:
        call: the call, whose kernel must be importable.

    Raises:
        UsageError: the kernel cannot be imported by another process, or an argument cannot travel.
    """

    def __init__(self, call: AutotunedCall) -> None:
        if not is_importable(call):
            raise UsageError(
                f"`isolate` measures in another process, which must import the kernel, but {call.name} is in a script, "
                "a notebook or a function. Move it into a module, or leave out `isolate`."
            )
        self._folder = tempfile.TemporaryDirectory(prefix="blocktune-")
        launched = {name: value for name, value in call.kwargs.items() if name not in ("grid", "warmup")}
        self.document = {
            "kernel": call.name,
            "source_hash": call.source_hash,
            "folder": self._folder.name,
            "arguments": save_arguments(call.args, launched, Path(self._folder.name)),
            "grids": grids_of(call),
            "configs": [config.to_json() for config in call.configs],
            "l2": call.settings.l2,
            "device": torch.cuda.current_device() if torch.cuda.is_available() else None,
        }

    def close(self) -> None:
        """Delete the folder; harmless when repeated."""
        self._folder.cleanup()


def call_of(document: Mapping[str, Any]) -> AutotunedCall:
    """Return the call that `SavedCall` describes, with copies of its arguments, which are on the caller's device.

    Raises:
        RuntimeError: another source is found under the kernel's name.
    """
    if document["device"] is not None:  # on which launches run, too
        torch.cuda.set_device(document["device"])
    found = object_named(document["kernel"])
    tuner, function = tuner_in(found), jitted_function(found)
    if tuner is None or hash_of_sources(function) != document["source_hash"]:
        raise RuntimeError(f"{document['kernel']} is another function here; is it saved as it runs?")
    args, kwargs = load_arguments(document["arguments"], Path(document["folder"]))
    own = {launch_config(document["kernel"], config): config for config in tuner.configs}
    configs = [LaunchConfig.from_json(config) for config in document["configs"]]
    return AutotunedCall(
        tuner=tuner,
        function=function,
        name=document["kernel"],
        source_hash=document["source_hash"],
        problem=LaunchProblem(()),
        configs={config: own.get(config) or triton_config(config) for config in configs},
        args=args,
        kwargs=kwargs | {"grid": _grid(document["grids"]), "warmup": False},
        settings=Settings(l2=document["l2"]),
    )


def _grid(grids: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Return the grid as the caller's function would give it, from a table by the constants of the configs."""
    names = grids["names"]
    table = {tuple(values): tuple(grid) for values, grid in grids["rows"]}
    return lambda meta: table[tuple(meta.get(name) for name in names)]


def grids_of(call: AutotunedCall) -> dict[str, Any]:
    """Return the grid of a call by the constants that its configs give, for a process that has no function to compute
    it."""
    names = sorted({name for config in call.configs.values() for name in config.kwargs})
    rows = {}
    for config in call.configs.values():
        meta = meta_of(call, config.all_kwargs())
        rows[tuple(meta.get(name) for name in names)] = call.grid(meta)
    return {"names": names, "rows": [[list(values), list(found)] for values, found in rows.items()]}


def meta_of(call: AutotunedCall, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a grid function is given: all arguments by name, defaults and heuristics included."""
    return grid_arguments(call.tuner.fn, call.function, {**call.named, **options})
