"""The file of compile facts, one a line, sorted: what was measured of which kernels with which Triton."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import triton

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.limits import limits_for
from tests.support.compiles.keys import kernel_hash, key_of, measure_digest, named
from tools import ROOT

FILE = ROOT / "tests/data/compile_facts.txt"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of compiled code.

    measure: `module:function@digest` of what measures. kernels: of those that are compiled, `module:function@hash`.
    key: see `keys.key_of`.
    """

    triton: str
    arch: str
    measure: str
    kernels: str
    key: str

    @classmethod
    def of(
        cls, measure: Callable[..., Any], specs: Sequence[CompileSpec], cc: tuple[int, int], rest: tuple[Any, ...]
    ) -> Self:
        """Return the question that `measure(specs, cc, *rest)` answers."""
        kernels = ",".join(sorted({named(spec.function, kernel_hash) for spec in specs}))
        name = named(measure, measure_digest)
        arch = f"sm_{limits_for(cc).sm_arch}"
        return cls(triton.__version__, arch, name, kernels, key_of(measure, specs, cc, rest))

    def line(self, answer: Any) -> str:
        """Return the line of the file that answers the question."""
        return f"{self.triton} {self.arch} {self.measure} {self.kernels} {self.key} {answer!r}"


@cache
def known() -> dict[str, str]:
    """Return the text of every remembered answer by its key."""
    return {line.split(" ", 5)[4]: line.split(" ", 5)[5] for line in lines()}


def lines() -> list[str]:
    """Return the lines of the file."""
    return FILE.read_text().splitlines() if FILE.exists() else []


def write(asked: Iterable[str]) -> None:
    """Add the lines that a run asked for, and drop those of kernels and measures that are no longer as they were."""
    kept = {line.split(" ", 5)[4]: line for line in lines() if not is_stale(line)}
    kept |= {line.split(" ", 5)[4]: line for line in asked}
    FILE.write_text("".join(f"{line}\n" for line in sorted(kept.values())))


def is_stale(line: str) -> bool:
    """Return whether a kernel or the measure of a line has changed since, so that nothing will ask for it again."""
    _, _, measure, kernels, _ = line.split(" ", 5)[:5]
    return _has_changed(measure, measure_digest) or any(_has_changed(each, kernel_hash) for each in kernels.split(","))


@cache
def _has_changed(told: str, digest_of: Callable[[Any], str]) -> bool:
    """Return whether the `module:function@digest` of a line is no longer that of the function."""
    place, _, digest = told.partition("@")
    module, _, name = place.partition(":")
    try:
        return digest_of(getattr(importlib.import_module(module), name)) != digest
    except (ImportError, AttributeError):
        return True
