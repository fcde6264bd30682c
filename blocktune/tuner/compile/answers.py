"""What a worker process says to its parent: lines of JSON on a pipe of their own."""

import json
import os
import subprocess
from collections.abc import Mapping
from typing import TextIO

MAKE_ROOM = (
    "Make room on the disks of Triton's cache (TRITON_CACHE_DIR, else ~/.triton) and of temporary files (TMPDIR), free "
    "memory, or wait until the GPU is free"
)
"""The way out of most failures of the machine, as the beginning of a sentence."""

_WORDS = (
    "failed with error code -9",  # ptxas, killed from outside: most likely memory ran out
    "busy or unavailable",  # another process has the GPU to itself
    "no CUDA-capable device",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "GPU is lost",
)
"""What tools and drivers say of a failure of the machine; CUDA's errors have no types of their own."""


def is_of_the_machine(error: Exception) -> bool:
    """Return whether a compile or a launch failed by the machine, such as by a full disk or memory: not by what was
    compiled or launched, which may do well later."""
    if isinstance(error, (OSError, MemoryError, subprocess.SubprocessError)):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    return "OutOfMemoryError" in names or any(words in str(error) for words in _WORDS)


def private_stdout() -> TextIO:
    """Keep the pipe to the parent for answers alone and send what anyone prints to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def send(answers: TextIO, message: Mapping[str, object]) -> None:
    """Write a message as a line, at once."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()
