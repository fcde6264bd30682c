"""A kernel's source hash is its own: the same in every process, whatever was hashed before it."""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blocktune.kernels.base import source_hash
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.registry import KERNELS
from tests.support.suite import warm_python

# Triton 3.6 leaves a module-level tl.constexpr out of a hash if another kernel's hash has already merged it. Code that
# was compiled ahead, and results stored under the hash, would then not be found again.
PROGRAM = """
import json, sys
from blocktune.kernels.registry import KERNELS
print(json.dumps({name: KERNELS[name].source_hash for name in sys.argv[1:]}))
"""


def hashes(*names: str) -> dict[str, str]:
    """The source hashes that a fresh process computes in this order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", PROGRAM, *names]
    process = warm_python.run(command, check=True, env=environment)
    result: dict[str, str] = json.loads(process.stdout)
    return result


def test_source_hashes_do_not_depend_on_the_order() -> None:
    forwards = hashes(*KERNELS)
    assert hashes(*reversed(KERNELS)) == forwards
    assert {len(value) for value in forwards.values()} == {16}
    alike = {
        "flash_v2": "flash_fwd_padded",  # one function, with other sizes
        "flash_bwd_hopper_sparse": "flash_bwd_hopper",  # one function, with lists of blocks
    }
    for name, other in alike.items():
        assert forwards.pop(name) == forwards[other]
    assert len(set(forwards.values())) == len(KERNELS) - len(alike)


def test_source_hash_of_a_kernel_alone_is_the_same() -> None:
    last = list(KERNELS)[-1]
    assert hashes(last)[last] == hashes(*KERNELS)[last]


HELPERS = """
import triton
import triton.language as tl

WIDTH = tl.constexpr(4)
PLAIN = 4

@triton.jit
def once(x):
    return x + 0

@triton.jit
def twice(x):
    return once(x) + x

@triton.jit
def unused(x):
    return x
"""

KERNEL = """
import triton
import triton.language as tl
from triton.language import cdiv
from triton.language.core import _aggregate as aggregate
import {package}
import {package} as helpers
from {package} import once as renamed, twice
from blocktune.kernels.base.source_hash import TritonTrait

SCALE = tl.constexpr(2.0)
LABEL: tl.constexpr = "a"
NAMES = ("x",)
NOT_USED = tl.constexpr(3)
TRAIT: TritonTrait = tl.constexpr(True)
HIDDEN = 3
{extra}
def made(count):
    @triton.jit
    def kernel(x, HIDDEN):
        {body}
    return kernel

@triton.jit(do_not_specialize=NAMES)
def kernel(x, HIDDEN):
    {body}

def host(x, *, block):
    kernel[(block,)](x, 1)

class Holder:
    fn = staticmethod(host)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], ModuleType]:
    """Imports a kernel with this body and its helpers, from a folder of its own, after some edits of the sources."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def loaded(body: str, old: str = "", new: str = "", extra: str = "") -> ModuleType:
        folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        kernel = KERNEL.replace("{extra}", extra).replace("{body}", body).replace("{package}", "hashed_helpers")
        for name, source in (("hashed_helpers", HELPERS), ("hashed_kernel", kernel)):
            (folder / f"{name}.py").write_text(source.replace(old, new) if old else source)
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(folder)
        module = importlib.import_module("hashed_kernel")
        for name in ("hashed_helpers", "hashed_kernel"):
            sys.modules.pop(name, None)
        return module

    return loaded


CALLS = {
    "by name": "return twice(x)",
    "under another name": "return renamed(x) + 0",
    "through its module": "return helpers.twice(x)",
    "through the full name of its module": "return hashed_helpers.twice(x)",
    "in nested code": "return (lambda y: twice(y))(x)",
    "in a comprehension": "return [twice(y) for y in (x,)][0]",
    "as an argument": "return tl.reduce(x, 0, twice)",
    "as a default argument": "return (lambda y=twice: y)()(x)",
}


@pytest.mark.parametrize("body", CALLS.values(), ids=CALLS)
def test_a_change_of_a_jitted_helper_changes_the_hash(load: Any, body: str) -> None:
    here = hash_of_sources(load(body).kernel)
    assert hash_of_sources(load(body).kernel) == here
    assert hash_of_sources(load(body, "return x + 0", "return x - 0").kernel) != here, "two calls away"
    assert hash_of_sources(load(body, "def unused(x):\n    return x", "def unused(x):\n    return -x").kernel) == here


CONSTANTS = {
    "a constexpr": ("return x * SCALE", "SCALE = tl.constexpr(2.0)", "SCALE = tl.constexpr(3.0)"),
    "an annotated one": ("return x + len(LABEL)", 'LABEL: tl.constexpr = "a"', 'LABEL: tl.constexpr = "b"'),
    "one in nested code": ("return (lambda y: y * SCALE)(x)", "tl.constexpr(2.0)", "tl.constexpr(3.0)"),
    "one of another module": ("return x * helpers.WIDTH", "WIDTH = tl.constexpr(4)", "WIDTH = tl.constexpr(8)"),
    "a plain one of another module": ("return x * helpers.PLAIN", "PLAIN = 4", "PLAIN = 8"),
    "one that is a type": ("return x.to(SCALE)", "tl.constexpr(2.0)", "tl.float16"),
}


@pytest.mark.parametrize(("body", "old", "new"), CONSTANTS.values(), ids=CONSTANTS)
def test_a_change_of_a_global_constant_changes_the_hash(load: Any, body: str, old: str, new: str) -> None:
    assert hash_of_sources(load(body, old, new).kernel) != hash_of_sources(load(body).kernel)


UNRELATED = {
    "lines above": ("import triton\n", "import triton\n\n\n"),
    "a constant that is not named": ("tl.constexpr(3)", "tl.constexpr(5)"),
    "a constant that a parameter hides": ("HIDDEN = 3", "HIDDEN = 5"),
    "what this Triton is like": ("TRAIT: TritonTrait = tl.constexpr(True)", "TRAIT: TritonTrait = tl.constexpr(False)"),
    "what a decorator names": ('NAMES = ("x",)', 'NAMES = ("HIDDEN",)'),
}


@pytest.mark.parametrize(("old", "new"), UNRELATED.values(), ids=UNRELATED)
def test_a_change_beside_the_code_does_not_change_the_hash(load: Any, old: str, new: str) -> None:
    body = "return twice(x) * SCALE + HIDDEN + TRAIT"
    assert hash_of_sources(load(body, old, new).kernel) == hash_of_sources(load(body).kernel)


def test_what_triton_brings_is_not_read(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    source_of = source_hash._source_of

    def reading(holder: Any, function: Any) -> str:
        read.append(function.__name__)
        return source_of(holder, function)

    monkeypatch.setattr(source_hash, "_source_of", reading)
    kernel = load("return tl.sum(x, 0) + cdiv(x, 2) + tl.standard.zeros_like(x) + twice(x)").kernel
    assert hash_of_sources(kernel)
    assert set(read) == {"kernel", "twice", "once"}


def test_the_text_that_triton_has_read_is_the_function_s(load: Any) -> None:
    """The hash is of the text, whoever read it: it must not change with the version of Triton that keeps it."""
    kernel = load("return twice(x) + 1").kernel
    assert source_hash._source_of(kernel, kernel.fn) == inspect.getsource(kernel.fn)


def test_a_closure_belongs_to_the_code(load: Any) -> None:
    body = "return twice(x) * count"
    one, two = load(body).made, load(body, "return x + 0", "return x - 0").made
    assert hash_of_sources(one(1)) == hash_of_sources(one(1))
    assert hash_of_sources(one(1)) != hash_of_sources(one(2))
    assert hash_of_sources(one(1)) != hash_of_sources(two(1))


def test_helpers_of_one_name_in_two_modules_both_count(load: Any) -> None:
    body = "return once(x) + helpers.once(x)"
    own = "@triton.jit\ndef once(x):\n    return x * 2\n"
    here = hash_of_sources(load(body, extra=own).kernel)
    assert hash_of_sources(load(body, "return x + 0", "return x - 0", own).kernel) != here
    assert hash_of_sources(load(body, "return x * 2", "return x * 3", own).kernel) != here


def test_a_host_function_counts_with_what_it_launches(load: Any) -> None:
    body = "return helpers.twice(x) * SCALE"
    here = hash_of_sources(load(body).Holder)
    assert hash_of_sources(load(body).Holder) == here
    for old, new in (("tl.constexpr(2.0)", "tl.constexpr(3.0)"), ("x + 0", "x - 0"), ("(block,)", "(block, 1)")):
        assert hash_of_sources(load(body, old, new).Holder) != here


AGGREGATE = """
@aggregate
class Pair:
    one: tl.tensor
    other: tl.tensor

    @triton.jit
    def sum(self):
        return twice(self.one) + self.other
"""


def test_the_methods_of_an_aggregate_count(load: Any) -> None:
    body = "return Pair(x, x).sum()"
    here = hash_of_sources(load(body, extra=AGGREGATE).kernel)
    assert hash_of_sources(load(body, "+ self.other", "- self.other", AGGREGATE).kernel) != here
    assert hash_of_sources(load(body, "return x + 0", "return x - 0", AGGREGATE).kernel) != here
