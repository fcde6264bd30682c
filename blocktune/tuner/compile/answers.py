"""What a worker process says to its parent: lines of JSON on a pipe of their own."""

import json
import os
import subprocess
from collections.abc import Mapping
from typing import TextIO

_KILLED_CHILD = "failed with error code -9"  # ptxas, killed from outside: most likely memory ran out


def is_of_the_machine(error: Exception) -> bool:
    """Return whether a compile or a launch failed by the machine, such as by a full disk: not by what was compiled or
    launched, which may do well later."""
    return isinstance(error, (OSError, MemoryError, subprocess.SubprocessError)) or _KILLED_CHILD in str(error)


def private_stdout() -> TextIO:
    """Keep the pipe to the parent for answers alone and send what anyone prints to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def send(answers: TextIO, message: Mapping[str, object]) -> None:
    """Write a message as a line, at once."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()
