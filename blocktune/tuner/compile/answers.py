"""What a worker process says to its parent: lines of JSON on a pipe of their own."""

import json
import os
from collections.abc import Mapping
from typing import TextIO


def private_stdout() -> TextIO:
    """Keep the pipe to the parent for answers alone and send what anyone prints to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def send(answers: TextIO, message: Mapping[str, object]) -> None:
    """Write a message as a line, at once."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()
