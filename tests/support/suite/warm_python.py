"""Programs of tests in processes that need not import PyTorch and Triton first, which takes 3 s of a processor.

`run` takes the place of `subprocess.run` for `python -P -c CODE` and `python -P -m MODULE`. The process is forked from
a server that has imported packages of others, and none of ours. Tests of start-up, of imports and of signals start
Python itself.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SERVER = Path(__file__).with_name("warm_server.py")
LONGEST = 100
"""More than the characters of an answer."""


@dataclass
class Used:
    """What the programs that ended have taken: they are no children of this process, whose times lack theirs."""

    processor_seconds: float = 0.0


used = Used()


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float | None = None,
    check: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Return what the program printed and how it ended, as `subprocess.run` does with captured output.

    Raises:
        subprocess.TimeoutExpired: it did not end in time, and was killed.
        subprocess.CalledProcessError: it failed, and was to be checked.
    """
    words = [str(word) for word in command]
    assert words[:2] == [sys.executable, "-P"]
    assert words[2] in ("-c", "-m")
    environment = dict(os.environ if env is None else env)
    request = {"words": words[2:], "environment": environment, "folder": str(cwd or os.getcwd())}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        status = _ended(request, (out.fileno(), err.fileno()), timeout)
        for file in (out, err):
            file.seek(0)
        done = subprocess.CompletedProcess(words, status, out.read(), err.read())
    if check:
        done.check_returncode()
    return done


def _ended(request: Mapping[str, object], files: tuple[int, int], timeout: float | None) -> int:
    """Return the status with which the program ended; of a signal, its number below zero."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            environment = request["environment"]
            assert isinstance(environment, dict)
            server = _server(environment.get("TRITON_INTERPRET", ""), environment.get("PYTHONPATH", ""))
            socket.send_fds(server, [json.dumps(request).encode()], [theirs.fileno(), *files])
        program = int(ours.recv(LONGEST))
        ours.settimeout(timeout)
        try:
            status, seconds = ours.recv(LONGEST).split()
            used.processor_seconds += float(seconds)
            return int(status)
        except TimeoutError:
            os.killpg(program, signal.SIGKILL)
            raise subprocess.TimeoutExpired(str(request["words"]), timeout or 0) from None


@cache
def _server(interpret: str, path: str) -> socket.socket:
    """Return the way to a server whose Triton interprets or not, and which finds packages on this path."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"TRITON_INTERPRET": interpret, "PYTHONPATH": path}
    if not interpret:
        del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-P", str(SERVER), str(theirs.fileno())]
    with theirs:
        server = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    atexit.register(_stop, ours, server)
    return ours


def _stop(requests: socket.socket, server: "subprocess.Popen[bytes]") -> None:
    requests.close()
    server.wait()
