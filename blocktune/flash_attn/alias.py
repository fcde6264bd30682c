"""This package under flash-attention's module name, for programs that say `import flash_attn`."""

import re
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blocktune.kernels.values.errors import UsageError

NAME, PACKAGE = "flash_attn", __package__
VERSION = "2.8.3+blocktune"
"""The version whose functions these are; the local part says that they are blocktune's."""

SUBMODULES = ("flash_attn_interface", "bert_padding", "cute")

_METADATA = f"""Metadata-Version: 2.1
Name: flash-attn
Version: {VERSION}
Summary: blocktune's functions under flash-attention's module name, in this process alone; it is not installed.
"""


def alias() -> None:
    """Let `import flash_attn` of this process find `blocktune.flash_attn`.

    Call it before anything asks whether flash-attention is there: transformers asks once. Then `importlib.metadata`
    answers for `flash-attn` as well, with a version that ends in `+blocktune`; where flash-attention is installed, its
    own version stays the answer.

    Raises:
        UsageError: flash-attention itself is imported.
    """
    package = sys.modules[PACKAGE]
    loaded = sys.modules.get(NAME)
    if loaded is package:
        return
    if loaded is not None:
        raise UsageError(
            f"`alias` must be called before flash_attn is imported, but {getattr(loaded, '__file__', loaded)} is. Call "
            "it at the beginning of the program."
        )
    modules = {f"{NAME}.{name}": import_module(f"{PACKAGE}.{name}") for name in SUBMODULES}
    sys.modules.update({NAME: package, **modules})
    try:
        version(NAME)
    except PackageNotFoundError:
        sys.meta_path.append(StandInFinder())


class StandIn(Distribution):
    """The metadata of `flash-attn` for `importlib.metadata`: they name the package that its functions come from."""

    def read_text(self, filename: str) -> str | None:
        """Return one of the texts that a distribution consists of."""
        return {"METADATA": _METADATA, "top_level.txt": NAME}.get(filename)

    def locate_file(self, path: Any) -> Path:
        """Return where a file of the package is."""
        return Path(__file__).parents[1] / str(path)


class StandInFinder(DistributionFinder):
    """Finds the distribution, and no module: those are in `sys.modules`."""

    def find_spec(self, *arguments: Any) -> None:
        """Find no module."""
        del arguments

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Return the distribution where all are wanted, or the one of this name."""
        name = None if context is None else context.name
        return [StandIn()] if name is None or re.sub(r"[-_.]+", "_", name).lower() == NAME else []
