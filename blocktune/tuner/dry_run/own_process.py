"""A function of blocktune in a process of its own: `python -m blocktune.tuner.dry_run.own_process DESCRIPTOR`.

It is started by `Popen`, so it runs none of the user's script. Function, arguments and result go through a pipe, whose
file descriptor the process is given.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from blocktune.kernels.values.errors import BlocktuneError
from blocktune.tuner.compile_server.client import worker_environment

_MODULE = "blocktune.tuner.dry_run.own_process"


def run_in_own_process(function: Callable[..., Any], *args: Any, variables: Mapping[str, str]) -> Any:
    """Return what a function returns in another process, whose output goes to standard error.

    Args:
        function: one that is found by its name.
        args: its arguments.
        variables: of the environment, besides those of this process.

    Raises:
        BlocktuneError: the function raises it.
        EOFError: the process ends without an answer.
    """
    ours, theirs = Pipe()
    command, descriptor = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())], theirs.fileno()
    environment = worker_environment() | dict(variables)
    with (
        ours,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[descriptor], env=environment
        ) as process,
    ):
        theirs.close()
        try:
            answer = _answer(ours, (function, args))
        except BaseException:
            process.kill()
            raise
    if isinstance(answer, BlocktuneError):
        raise answer
    return answer


def _answer(pipe: Any, question: object) -> Any:
    try:
        pipe.send(question)
        return pipe.recv()
    except OSError as error:
        raise EOFError from error


def main() -> None:
    """Answer one question."""
    with Connection(int(sys.argv[1])) as pipe:
        function, args = pipe.recv()
        try:
            answer = function(*args)
        except BlocktuneError as error:
            answer = error
        pipe.send(answer)


if __name__ == "__main__":
    main()
