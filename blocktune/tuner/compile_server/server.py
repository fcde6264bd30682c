"""The process that compiles: `python -m blocktune.tuner.compile_server.server PARENT`, by the parent's process id.

It imports kernels once and forks a worker for each compile that runs at a time: a fork takes milliseconds where the
imports take seconds, and a library that looks at the GPU does so once. It launches nothing, and runs one thread by the
time it forks. A compile that crashes or hangs costs its worker, never this process.

Each line on standard input is a command and each line on standard output an answer, one JSON object per line.

    {"ready": true}
    {"end": true}
    {"prepare": "module", "path": ["…"], "environment": {…}, "found": {…}}
    {"id": 1, "timeout_s": 60, "workers": 16, …}      further as in tuner/compile_server/jobs.py
    {"abandon": 1}
    {"id": 1, "begun": true}
    {"id": 1, "outcome": "ok", "resources": {…}, "shared": {…}, "error": "", "seconds": 1.2, "transient": false}
    {"id": 1, "lost": "died", "signum": 6, "last_words": "…"}

`prepare` says what later jobs are compiled with, and which GPU modules find if it is none that is here; workers that
were forked before finish what they have, and end.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.tuner.compile.answers import die_with_parent, private_stdout, send
from blocktune.tuner.compile.compiler import compile_key, hash_triton
from blocktune.tuner.compile_server.forked_worker import ForkedWorker
from blocktune.tuner.compile_server.jobs import spec_in
from blocktune.tuner.offline.stand_in import stand_in

_CHUNK = 1 << 16


class CompileServer:
    """Takes commands until they end, and has workers do them.

    Args:
        commands: the file descriptor of the commands.
        answers: takes the answers.
    """

    def __init__(self, commands: int, answers: TextIO) -> None:
        self._commands, self._answers = commands, answers
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)
        self._unread = b""
        self._waiting: deque[dict[str, Any]] = deque()
        self._workers: list[ForkedWorker] = []
        self._surroundings: tuple[Any, ...] = ()
        self._stands_in, self._lasting = False, contextlib.ExitStack()
        self._key = threading.Thread(target=hash_triton)  # a hash of all of Triton, while a library is imported
        self._key.start()

    def serve(self) -> None:
        """Serve until the commands end; workers end with them."""
        send(self._answers, {"ready": True})
        while self._listen():
            self._hand_out()
        for worker in self._workers:
            worker.end()

    def _listen(self) -> bool:
        """Wait for a command, an answer or the end of a worker's time, and see to it; return whether more can come."""
        ends = [worker.deadline for worker in self._workers if worker.job is not None]
        wait = max(0.0, min(ends) - time.monotonic()) if ends else None
        for key, _ in self._selector.select(wait):
            if key.fd == self._commands:
                if not self._take_commands():
                    return False
            elif key.data in self._workers:  # a command may have ended it meanwhile
                self._hear(key.data)
        for worker in [each for each in self._workers if each.is_overdue()]:
            self._lose(worker, "timeout")
        return True

    def _take_commands(self) -> bool:
        data = os.read(self._commands, _CHUNK)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for command in map(json.loads, lines):
            if "end" in command:
                return False
            if "prepare" in command:
                self._prepare(command)
            elif "abandon" in command:
                self._abandon(command["abandon"])
            else:
                self._waiting.append(command)
        return bool(data)

    def _prepare(self, command: Mapping[str, Any]) -> None:
        """Take the paths and the environment of the caller, and import the module."""
        module, path, environment = command["prepare"], command["path"], command["environment"]
        surroundings = (path, environment)
        if surroundings == self._surroundings and module in sys.modules:
            return
        self._surroundings, sys.path[:] = surroundings, path
        os.environ.clear()
        os.environ.update(environment)
        if "found" in command and not self._stands_in:
            self._stands_in = True
            self._lasting.enter_context(stand_in(DeviceSpec.from_json(command["found"])))
        try:
            importlib.import_module(module)
        except Exception as error:  # the jobs say that this process has no such kernel
            sys.stderr.write(f"{module}: {error}\n")
        gc.collect()
        gc.freeze()  # so that the collector of a worker does not copy the memory that it shares with this process
        for worker in [each for each in self._workers if each.job is None]:
            self._drop(worker)
        for worker in self._workers:
            worker.is_old = True

    def _abandon(self, number: int) -> None:
        """Forget a job that waits, or end the worker that does it."""
        self._waiting = deque(job for job in self._waiting if job["id"] != number)
        for worker in [each for each in self._workers if each.job is not None and each.job["id"] == number]:
            self._drop(worker)

    def _hand_out(self) -> None:
        """Give waiting jobs to workers."""
        while self._waiting:
            idle = [worker for worker in self._workers if worker.job is None]
            if not idle and len(self._workers) >= self._waiting[0]["workers"]:
                return
            job = self._waiting.popleft()
            worker = idle[0] if idle else self._fork_worker(job)
            worker.take(job)
            send(self._answers, {"id": job["id"], "begun": True})

    def _fork_worker(self, job: Mapping[str, Any]) -> ForkedWorker:
        """Return another worker, which inherits what the key of a job is made of: Triton's hash and the source's."""
        self._key.join()
        with contextlib.suppress(Exception):  # the job says what is wrong
            compile_key(spec_in(job), tuple(job["cc"]))
        worker = ForkedWorker([self._answers, *(each.channel for each in self._workers)])
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, worker: ForkedWorker) -> None:
        answer = worker.answer()
        if answer is None:
            self._lose(worker, "died")
        elif answer:
            send(self._answers, answer)
            if worker.is_old:
                self._drop(worker)

    def _lose(self, worker: ForkedWorker, how: str) -> None:
        """Answer for a worker that gives no answer."""
        job, words = worker.job, worker.errors.last_words()
        signum = self._drop(worker)
        if job is not None:
            send(self._answers, {"id": job["id"], "lost": how, "signum": signum, "last_words": words})

    def _drop(self, worker: ForkedWorker) -> int:
        self._selector.unregister(worker.channel)
        self._workers.remove(worker)
        return worker.end()


def main(arguments: list[str]) -> None:
    (parent,) = arguments
    die_with_parent(int(parent))
    CompileServer(sys.stdin.fileno(), private_stdout()).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
