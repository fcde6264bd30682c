"""Another version of an autotuned kernel: as a git revision, or another file, has its module."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.offline.specialization import object_named


@contextmanager
def kernel_version(name: str, place: str) -> Iterator[Any]:
    """Yield the kernel `module:function` as a git revision or a file has it. What its module imports is of today.

    Raises:
        UsageError: there is no such kernel, revision or file, or the module of that version raises.
    """
    object_named(name)
    module, _, path = name.partition(":")
    with tempfile.TemporaryDirectory(prefix="blocktune-") as folder:  # Triton reads the source of functions later
        file = Path(place)
        if not file.is_file():
            source = Path(str(import_module(module).__file__))
            file = Path(folder, source.name)
            file.write_text(_text_at(source, place), encoding="utf-8")
        try:
            kernel = reduce(getattr, path.split("."), _module_in(file, module))
        except Exception as error:  # whatever the code of a module raises
            raise UsageError(f"{name} of {place} cannot be loaded: {type(error).__name__}: {error!s:.300}.") from error
        yield kernel


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


def _module_in(file: Path, name: str) -> ModuleType:
    """Return the module of a file under a name, next to the one that has this name already."""
    loader = SourceFileLoader(name, str(file))
    spec = spec_from_loader(name, loader)
    assert spec is not None  # the loader is given
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
