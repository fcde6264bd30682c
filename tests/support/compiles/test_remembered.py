"""What is remembered of compiled code is what was measured, by this very function of this very code."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import triton

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from tests.kernels.portable.test_row_alignment import shape_of
from tests.support.compiles import facts, keys
from tests.support.compiles import remembered as module
from tests.support.compiles.remembered import Memory, remembered

HOPPER, BLACKWELL = (9, 0), (10, 0)


class Calls:
    """The numbers that `doubled` was called with in this session."""

    numbers: ClassVar[list[int]] = []


@remembered
def doubled(specs: Sequence[CompileSpec], cc: tuple[int, int], number: int) -> tuple[int, str]:
    """What nothing has to be compiled for."""
    Calls.numbers.append(number)
    return 2 * number, str(specs[0].function.__name__)


def spec_of(head_dim: int = 64, **changes: Any) -> tuple[CompileSpec]:
    kernel, shape = get_kernel("flash_fwd"), shape_of("flash_fwd", head_dim)
    return (replace(kernel.compile_spec(kernel.default_config(shape, limits_for(HOPPER)), shape), **changes),)


@pytest.fixture(autouse=True)
def restarted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Memory]]:
    """Begins a new session, in which the file says what the last one asked for; at first there is no file."""

    def begin(**told: Any) -> Memory:
        facts.write(module.memory.asked)
        facts.known.cache_clear()
        Calls.numbers.clear()
        monkeypatch.setattr(module, "memory", Memory(**told))
        return module.memory

    monkeypatch.setattr(facts, "FILE", tmp_path / "facts.txt")
    monkeypatch.setattr(module, "memory", Memory())
    begin()
    yield begin
    facts.known.cache_clear()


def test_an_answer_is_measured_once(restarted: Callable[..., Memory]) -> None:
    assert [doubled(spec_of(), HOPPER, 3) for _ in range(2)] == [(6, "flash_fwd_kernel")] * 2
    memory = restarted()
    assert doubled(spec_of(), HOPPER, 3) == (6, "flash_fwd_kernel")
    assert (Calls.numbers, memory.new) == ([], {})


@pytest.mark.parametrize(
    ("specs", "cc", "number"),
    [
        (spec_of(), HOPPER, 4),
        (spec_of(), BLACKWELL, 3),
        (spec_of(72), HOPPER, 3),
        (spec_of(options={"num_warps": 16}), HOPPER, 3),
        (spec_of() * 2, HOPPER, 3),
    ],
)
def test_anything_else_is_measured(
    specs: tuple[CompileSpec, ...], cc: tuple[int, int], number: int, restarted: Callable[..., Memory]
) -> None:
    doubled(spec_of(), HOPPER, 3)
    restarted()
    doubled(specs, cc, number)
    assert Calls.numbers == [number]


def test_a_change_of_the_compiler_or_the_kernel_is_measured(
    restarted: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(spec_of(), HOPPER, 3)
    for change in (
        lambda patch: patch.setattr(triton, "__version__", "3.6.1"),
        lambda patch: patch.setattr(keys, "ptxas_version", lambda cc: "1.2.3"),
        lambda patch: patch.setattr(keys, "kernel_hash", lambda function: "0" * 16),
        lambda patch: patch.setenv("DISABLE_PTXAS_OPT", "1"),
    ):
        restarted()
        with monkeypatch.context() as patch:
            change(patch)
            doubled(spec_of(), HOPPER, 3)
        assert Calls.numbers == [3]


@pytest.mark.parametrize("told", [{"mode": "check"}, {"tenth": 0}, {"tenth": 1}])
def test_a_wrong_fact_is_found(told: dict[str, Any], restarted: Callable[..., Memory]) -> None:
    numbers = range(60)  # of which each tenth has some
    for number in numbers:
        doubled(spec_of(), HOPPER, number)
    restarted()
    facts.FILE.write_text(facts.FILE.read_text().replace("'flash_fwd_kernel'", "'another'"))
    restarted(**told)
    found = [_told(number) for number in numbers]
    assert len(Calls.numbers) == sum("was remembered as" in text for text in found)
    assert len(Calls.numbers) > 0
    assert (len(Calls.numbers) < len(numbers)) == ("tenth" in told)


def _told(number: int) -> str:
    try:
        return doubled(spec_of(), HOPPER, number)[1]
    except AssertionError as error:
        return str(error)


def test_lines_of_kernels_that_changed_are_dropped(restarted: Callable[..., Memory]) -> None:
    for number in (1, 2):
        doubled(spec_of(), HOPPER, number)
    restarted()
    kept, changed = facts.lines()
    facts.FILE.write_text(f"{kept}\n{changed.replace('flash_fwd_kernel@', 'flash_fwd_kernel@0')}\n")
    restarted()
    assert facts.lines() == [kept]


MEASURE = '''
from tests.support.triton_modes import TRITON
FACTOR = {"a": 2}
def helper():
    """Return it."""
    return FACTOR  # of the measure
def measure(specs, cc):
    return helper()
'''


def digest_of(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the digest of the function in a module of this text."""
    name = f"tests.measure_{len(list(folder.iterdir()))}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, found)
    spec.loader.exec_module(found)
    return keys.measure_digest(found.measure)


def test_the_code_of_a_measure_counts_with_all_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*change: str) -> str:
        return digest_of(MEASURE.replace(*change) if change else MEASURE, tmp_path, monkeypatch)

    assert digest() == digest("Return it", "Return the factor") == digest("  # of the measure", "")
    assert len({digest(), digest('"a": 2', '"a": 3'), digest("return FACTOR", "return len(FACTOR)")}) == 3


def test_a_measure_with_a_value_that_has_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a text of their own, but got 'FACTOR = <object object"):
        digest_of(MEASURE.replace('{"a": 2}', "object()"), tmp_path, monkeypatch)


def test_the_facts_of_the_repository_are_sorted_and_readable() -> None:
    text = (facts.ROOT / "tests/data/compile_facts.txt").read_text()
    lines = text.splitlines()
    assert lines == sorted(set(lines))
    assert len({line.split(" ", 5)[4] for line in lines}) == len(lines)
