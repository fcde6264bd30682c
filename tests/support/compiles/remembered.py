"""`@remembered` above a function of compiled code: it runs only where its result for this code is not known.

`pytest --compile-facts=write` adds what a run asked for to the file of facts, `--compile-facts=check` compiles whatever
is asked and compares it with the file. With `--tenth` a tenth of the facts is compared in any case.
"""

from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest

from blocktune.kernels.base.kernel import CompileSpec
from tests.support.compiles import facts
from tests.support.suite.tenths import tenth_of

Rest = ParamSpec("Rest")
Value = TypeVar("Value")
Cc = tuple[int, int]
Measure = Callable[Concatenate[Sequence[CompileSpec], Cc, Rest], Value]

OPTION, REPORT = "--compile-facts", "compile_facts"


class Memory:
    """What this process may take from the file of facts, and what it was asked for.

    asked: the lines of all answers. new: those of them that the file did not have, by their keys.
    """

    def __init__(self, mode: str = "use", tenth: int | None = None) -> None:
        self.mode, self.tenth = mode, tenth
        self.asked: set[str] = set()
        self.new: dict[str, str] = {}

    def trusts(self, key: str) -> bool:
        """Return whether the file's answer is taken as it is."""
        return self.mode != "check" and tenth_of(key) != self.tenth


memory = Memory()


def remembered(measure: Measure[Rest, Value]) -> Measure[Rest, Value]:
    """Return a function of specs, a compute capability and other values with a memory of its answers.

    What it returns must be a literal of Python. What it raises is not remembered.

    Raises:
        AssertionError: an answer differs from the remembered one.
    """

    @wraps(measure)
    def answer(specs: Sequence[CompileSpec], cc: Cc, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Value:
        question = facts.Question.of(measure, specs, cc, (args, sorted(kwargs.items())))
        told = memory.new.get(question.key) or facts.known().get(question.key)
        if told is None or not memory.trusts(question.key):
            value = measure(specs, cc, *args, **kwargs)
            assert told is None or value == literal_eval(told), f"{question.line(value)} was remembered as {told}"
            if told is None:
                memory.new[question.key] = repr(value)
        else:
            value = literal_eval(told)
        memory.asked.add(question.line(value))
        return value

    return answer


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--compile-facts`."""
    says = "`write` adds to the compile facts what the run asks for, `check` compares every one with the compiler."
    parser.addoption(OPTION, choices=("use", "write", "check"), default="use", help=says)


def pytest_configure(config: pytest.Config) -> None:
    """Set up the memory of this process, and collect that of workers."""
    memory.__init__(config.getoption(OPTION), config.getoption("--tenth"))
    config.pluginmanager.register(Reporter())


class Reporter:
    """Collects what workers asked for, and writes and counts it. A check fails where the file is stale."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        told = getattr(session.config, "workeroutput", None)
        if told is not None:
            told[REPORT] = (sorted(memory.asked), memory.new)
        elif memory.mode == "write":
            facts.write(memory.asked)
        elif memory.mode == "check" and self._stale():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        asked, new = getattr(node, "workeroutput", {}).get(REPORT, ((), {}))
        memory.asked.update(asked)
        memory.new |= new

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        asked, new, stale = len(memory.asked), len(memory.new), self._stale()
        if new or stale:
            terminalreporter.write_line(
                f"compile facts: {new} of {asked} are not in the file and were compiled; {stale} of its lines "
                "are stale. `make compile-facts` brings it up to date."
            )

    def _stale(self) -> int:
        return sum(map(facts.is_stale, facts.lines())) if memory.asked else 0
