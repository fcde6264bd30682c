"""The server of `warm_python`: forks a process for every request, and ends when its client has ended."""

import contextlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import types
from typing import Any

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Whether PyTorch calls packages such as ours when it is imported. In the server it does not: the programs do."""
LARGEST = 1 << 20


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Return in every forked process with what it is to run, and with None when the client has closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(requests, LARGEST, 3)
        if not message:
            return None
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked: dict[str, Any] = json.loads(message)
            if _is_program(*files):
                return asked
        for file in files:
            os.close(file)


def _is_program(answers: int, out: int, err: int) -> bool:
    """Fork once more. Return in the program; the process between tells how the program ended, and ends."""
    told = socket.socket(fileno=answers)
    if (child := os.fork()) != 0:
        told.send(str(child).encode())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # the client has closed
            told.send(f"{status} {sum(os.times()[2:4])}".encode())
        os._exit(0)
    told.close()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for place, file in enumerate((nothing, out, err)):
        os.dup2(file, place)
        os.close(file)
    return True


def play(words: list[str], environment: dict[str, str], folder: str) -> None:
    """Run `-c CODE` or `-m MODULE` with its arguments as a new Python would."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if environment.get(AUTOLOAD, "1") == "1":
        torch._import_device_backends()
    kind, what, *arguments = words
    sys.argv = [kind, *arguments]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    os.environ[AUTOLOAD] = "0"
    import sqlalchemy  # noqa: F401
    import torch
    import triton.experimental.gluon  # noqa: F401

    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        play(**request)
