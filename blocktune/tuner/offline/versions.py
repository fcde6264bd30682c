"""Another version of an autotuned kernel: as a git revision, or another file, has its module."""

import linecache
import subprocess
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.offline.specialization import object_named


def kernel_version(name: str, place: str) -> Any:
    """Return the kernel `module:function` as a git revision or a file has it. What its module imports is of today.

    Raises:
        UsageError: there is no such kernel, revision or file, or the module of that version raises.
    """
    object_named(name)
    module, _, path = name.partition(":")
    today = import_module(module)
    source = Path(str(today.__file__))
    text = Path(place).read_text(encoding="utf-8") if Path(place).is_file() else _text_at(source, place)
    try:
        return reduce(getattr, path.split("."), _module_of(today, f"{source}@{place}", text))
    except Exception as error:  # whatever the code of a module raises
        raise UsageError(f"{name} of {place} cannot be loaded: {type(error).__name__}: {error!s:.300}.") from error


def _text_at(source: Path, revision: str) -> str:
    """Return a file at a git revision.

    Raises:
        UsageError: git has none.
    """
    command = ("git", "-C", str(source.parent), "show", "--end-of-options", f"{revision}:./{source.name}")
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"{revision} is no file, and there is no `git` to look for a revision. Name a file."
        ) from error
    if shown.returncode:
        raise UsageError(
            f"{revision} is neither a file nor a git revision that has {source}: {shown.stderr.strip():.300}. Name one."
        )
    return shown.stdout


def _module_of(today: ModuleType, place: str, text: str) -> ModuleType:
    """Return a module of another text than today's; its functions have their source by the name of the place."""
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    module = ModuleType(today.__name__, today.__doc__)
    module.__dict__.update({"__file__": today.__file__, "__package__": today.__package__})
    exec(compile(text, place, "exec"), module.__dict__)
    return module
