"""A worker process's answers to its parent, as lines of JSON on their own pipe, and how a compile ended by them."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TextIO

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.tuner.compile.child_process import ChildDiedError, ChildLostError

Answer = dict[str, Any]

MAKE_ROOM = (
    "Make room on the disks of Triton's cache (TRITON_CACHE_DIR, else ~/.triton) and of temporary files (TMPDIR), free "
    "memory, or wait until the GPU is free"
)
"""The way out of most failures of the machine, as the beginning of a sentence."""

MAX_ERROR_TEXT = 2000

_PR_SET_PDEATHSIG = 1

_WORDS = (
    "failed with error code -9",  # ptxas, killed from outside: most likely memory ran out
    "failed with error code 137",  # the same, from a script around it
    "No space left on device",
    "busy or unavailable",  # another process has the GPU to itself
    "no CUDA-capable device",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "GPU is lost",
)
"""What tools and drivers say of a failure of the machine; CUDA's errors have no types of their own."""

_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals by which a compiler dies of its input; others come from outside, and the same compile may succeed later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """How one compile ended.

    outcome: `OK`, `INFEASIBLE` (the code needs more than any launch can get), `COMPILE_ERROR` or `COMPILE_TIMEOUT`.
    resources: None unless it is `OK`, or where they are not known. seconds: time of the compile, also when it was
    looked up. transient: it failed by the machine, such as by a full disk, and says nothing of the config.
    """

    outcome: Outcome
    resources: KernelResources | None = None
    error: str = ""
    seconds: float = 0.0
    transient: bool = False

    @classmethod
    def of_answer(cls, answer: Answer, **further: Any) -> Self:
        """Return what a worker says; `further` are fields that it does not know."""
        resources = answer["resources"]
        return cls(
            outcome=Outcome(answer["outcome"]),
            resources=None if resources is None else KernelResources(**resources),
            error=answer["error"],
            seconds=answer["seconds"],
            transient=answer["transient"],
            **further,
        )

    @classmethod
    def from_lost_worker(cls, lost: ChildLostError, timeout_s: float, **further: Any) -> Self:
        """Return the end of a compile whose worker gave no answer: killed from outside, as where memory ran out, it may
        do well later; a compiler that crashes dies of its input."""
        died = isinstance(lost, ChildDiedError)
        return cls(
            outcome=Outcome.COMPILE_ERROR if died else Outcome.COMPILE_TIMEOUT,
            error=_reason_of(lost, timeout_s),
            transient=died and not is_crash(lost),
            **further,
        )


def is_of_the_machine(error: Exception) -> bool:
    """Return whether a compile or a launch failed by the machine, such as by a full disk or memory: not by what was
    compiled or launched, which may do well later."""
    if isinstance(error, (OSError, MemoryError, ImportError, subprocess.SubprocessError)):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    return "OutOfMemoryError" in names or any(words in str(error) for words in _WORDS)


def failed_answer(error: Exception) -> Answer:
    """Return the answer to a job whose compile raised an error."""
    from triton.runtime.errors import OutOfResources

    text = f"{type(error).__name__}: {error}"
    return {
        "outcome": str(Outcome.INFEASIBLE if isinstance(error, OutOfResources) else Outcome.COMPILE_ERROR),
        "resources": None,
        "shared": None,
        "error": text[:MAX_ERROR_TEXT],
        "transient": is_of_the_machine(error),
    }


def die_with_parent(parent: int) -> None:
    """End this process group, ptxas included, when the thread that started this process ends (Linux)."""

    def end_group(signum: int, frame: object) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_group)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(1)


def private_stdout() -> TextIO:
    """Keep the pipe to the parent for answers alone and send what anyone prints to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def send(answers: TextIO, message: Mapping[str, object]) -> None:
    """Write a message as a line, at once."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def is_crash(lost: ChildLostError) -> bool:
    """Return whether the compiler died of its input."""
    return isinstance(lost, ChildDiedError) and lost.signum in _CRASHES


def _reason_of(lost: ChildLostError, timeout_s: float) -> str:
    """Return why a worker gave no answer, for people."""
    if isinstance(lost, ChildDiedError):
        reason = f"The compiler's process ended by {_ending(lost.signum)}."
    else:
        reason = f"The compile took more than {timeout_s:g} s."
    return f"{reason} {lost.last_words}".strip()


def _ending(signum: int) -> str:
    if not signum:
        return "itself"
    name = signal.Signals(signum).name
    return f"{name}, which may mean that memory ran out" if signum == signal.SIGKILL else name
