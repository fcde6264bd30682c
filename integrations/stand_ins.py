"""A plugin of pytest: stand-ins for compiled packages that engines import, so that their Python is read on a CPU.

make integrations-test
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import transformers.image_utils  # noqa: F401  it asks first whether torchvision is there

NAMES = ("IPython", "sgl_kernel", "torchvision")


class AnyClass(type):
    """A class with every attribute."""

    def __getattr__(cls, name: str) -> Any:
        return class_named(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


def class_named(name: str) -> AnyClass:
    """Return a class that takes everything, and decorates nothing.

    Raises:
        AttributeError: it is a name of Python's own.
    """
    if name.startswith("__"):
        raise AttributeError(name)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self

    body = {"__init__": lambda self, *arguments, **options: None, "__call__": call}
    return AnyClass(name, (), body | {"__getattr__": lambda self, asked: class_named(asked)})


class StandIn(ModuleType):
    """A module with every attribute."""

    __path__: Sequence[str] = ()
    __version__ = "99.0"

    def __getattr__(self, name: str) -> AnyClass:
        return class_named(name)


class StandIns(MetaPathFinder, Loader):
    """Finds the modules of packages that are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(name for name in names if find_spec(name) is None)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of a stand-in."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> StandIn:
        """Return the stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""


sys.meta_path.append(StandIns(NAMES))
