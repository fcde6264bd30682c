"""The environment variables of blocktune, and the one place that reads them.

Programs that only import torch or call `attention` inherit them, so no value raises: blanks at its ends do not count,
and one that means nothing costs a warning and leaves the variable at its default.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from blocktune.kernels.files.foreign_text import shown

logger = logging.getLogger("blocktune")

ON, OFF = ("1", "on", "yes", "true"), ("0", "off", "no", "false")
PREFIX = "BLOCKTUNE_"
_MAX_DIGITS = 9
_MAX_SHOWN = 80

_warned: set[tuple[str, str]] = set()
"""Variables and values that this process has warned of."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that holds a text. default: what holds where it is not set, in words. meaning: what it is for."""

    name: str
    default: str
    meaning: str
    values: ClassVar[str] = "text"

    def text(self) -> str:
        """Return the value without blanks at its ends; empty where it is not set."""
        return os.environ.get(self.name, "").strip()

    def problem(self) -> str | None:
        """Return what is wrong with the value and what is done instead; None where it means something."""
        said = self.text()
        if self._means_something(said):
            return None
        return (
            f"{self.name} must be {self.values}, but got {shown(repr(said), _MAX_SHOWN)}. The default is used instead: "
            f"{self.default}. Correct the variable, or unset it."
        )

    def set_to(self, text: str | None) -> None:
        """Set the variable for this process and those that it starts; None unsets it."""
        os.environ.pop(self.name, None)
        if text is not None:
            os.environ[self.name] = text

    def _means_something(self, said: str) -> bool:
        return True

    def _usable_text(self) -> str:
        """Return the value, or nothing and a warning, one for each value, where it means nothing."""
        said, problem = self.text(), self.problem()
        if problem is None:
            return said
        if (self.name, said) not in _warned:
            _warned.add((self.name, said))
            logger.warning("%s", problem)
        return ""


class StorePlace(Variable):
    """A variable that names a store: a path or a URL."""

    __slots__ = ()
    values = "a path or URL"


class File(Variable):
    """A variable that names a file."""

    __slots__ = ()
    values = "a path"


class OptionalFile(Variable):
    """A variable that names a file, or `off` for none."""

    __slots__ = ()
    values = "a path, or off"

    def is_off(self) -> bool:
        """Return whether the variable names no file on purpose."""
        return self.text().lower() in OFF


class Switch(Variable):
    """A variable that is 1 or 0, or a word for either."""

    __slots__ = ()
    values = "1 or 0, on or off"

    def is_on(self) -> bool:
        """Return what the variable says."""
        return (self._usable_text() or self.default).lower() in ON

    def _means_something(self, said: str) -> bool:
        return said.lower() in ("", *ON, *OFF)


class Count(Variable):
    """A variable that is a whole number."""

    __slots__ = ()
    values = "a whole number of at least 1"

    def number(self) -> int | None:
        """Return the number, or None where the variable does not say one."""
        said = self._usable_text()
        return int(said) if said else None

    def _means_something(self, said: str) -> bool:
        return not said or (said.isdecimal() and len(said) <= _MAX_DIGITS and int(said) > 0)


class Paths(Variable):
    """A variable that names files, separated as in PATH."""

    __slots__ = ()
    values = "paths, separated as in PATH"

    def items(self) -> list[str]:
        """Return the paths."""
        return _items(self.text(), os.pathsep)


class Names(Variable):
    """A variable that names classes, separated by commas."""

    __slots__ = ()
    values = "module:class, separated by commas"

    def items(self) -> list[str]:
        """Return the names."""
        return _items(self.text(), ",")


def _items(text: str, separator: str) -> list[str]:
    return [item.strip() for item in text.split(separator) if item.strip()]


DB = StorePlace(
    "BLOCKTUNE_DB",
    "in your data directory",
    "The store of all commands and of production, which also takes a results file (`*.json`).",
)
CANARY = Switch(
    "BLOCKTUNE_CANARY", "1", "Whether the first use of a config that is not exact is compared with the definition."
)
MISSES = OptionalFile(
    "BLOCKTUNE_MISSES",
    "`blocktune/misses.jsonl` in your state directory",
    "The file in which `attention` counts shapes without a measurement of their own.",
)
TRUST_OWNER = Switch(
    "BLOCKTUNE_TRUST_OWNER", "0", "Whether production takes files that another user owns or can replace."
)
TRUSTED_KEY = File(
    "BLOCKTUNE_TRUSTED_KEY",
    "none",
    "The public key whose signed files alone a strict dispatcher takes, and frozen winners of autotuned kernels.",
)
AUTOTUNE = Switch("BLOCKTUNE_AUTOTUNE", "0", "Whether `import torch` has every `@triton.autotune` tuned by blocktune.")
SDPA = Switch(
    "BLOCKTUNE_SDPA", "0", "Whether `import torch` has PyTorch's attention call blocktune's kernels (the provider)."
)
STRICT = Switch(
    "BLOCKTUNE_STRICT", "0", "Whether an autotuned kernel without a known winner raises an error instead of measuring."
)
FROZEN_KERNELS = Paths(
    "BLOCKTUNE_FROZEN_KERNELS", "none", "Frozen winners of autotuned kernels, which precede the store."
)
SUMMARY = Switch(
    "BLOCKTUNE_SUMMARY", "0", "Whether a process says at its end what its autotuned kernels cost and gained."
)
PRINT = Switch("BLOCKTUNE_PRINT", "0", "Whether a line says how each race of an autotuned kernel's configs ended.")
RECORD = File(
    "BLOCKTUNE_RECORD",
    "none",
    "The TOML file that gets the shapes of attention of a process, for `tune bench --shapes`.",
)
LAUNCHES = OptionalFile(
    "BLOCKTUNE_LAUNCHES",
    "`blocktune/launches.jsonl` in your state directory",
    "The file in which processes count launches of autotuned kernels.",
)
KERNEL_CLASSES = Names("BLOCKTUNE_KERNELS", "none", "Attention kernels from elsewhere that take part in searches.")
PROCESSORS = Count(
    "BLOCKTUNE_PROCESSORS", "those that this process may use", "The most processors that compiling takes."
)
COMMIT = Variable("BLOCKTUNE_COMMIT", "what Git says", "The commit of the sources, for a copy of them without history.")

VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        DB,
        CANARY,
        MISSES,
        TRUST_OWNER,
        TRUSTED_KEY,
        AUTOTUNE,
        SDPA,
        STRICT,
        FROZEN_KERNELS,
        SUMMARY,
        PRINT,
        RECORD,
        LAUNCHES,
        KERNEL_CLASSES,
        PROCESSORS,
        COMMIT,
    )
}
"""All of them, by name."""

LOCAL_RANKS = Count("LOCAL_WORLD_SIZE", "all ranks share a host", "The ranks of this host, as torchrun sets it.")
"""Not ours, and read as ours are."""


def unknown_names() -> Iterator[str]:
    """Yield the names in the environment that look like ours and are not."""
    return (name for name in sorted(os.environ) if name.startswith(PREFIX) and name not in VARIABLES)
