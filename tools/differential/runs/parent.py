"""Starts worker processes, hands out jobs, and goes on where a worker dies or hangs."""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from blocktune.kernels.hardware.nvml import Nvml

WORKER = "tools.differential.runs.worker"
ROOT = Path(__file__).parents[3]
"""The folder from which workers import it."""

COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""What workers tell PyTorch's compiler, which would start processes of its own in each of them."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

MESSAGE_CHARACTERS = 1500

MAX_FAILURES = 3
"""Workers in a row that end outside a case, after which a thread gives up."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How workers run. timeout_s: of a single case, compilation included."""

    device: str = "cuda"
    subject: str = "blocktune"
    pretend: str = ""
    timeout_s: float = 150.0
    start_timeout_s: float = 300.0
    environment: dict[str, str] = field(default_factory=dict)


class Ended(Exception):
    """The worker has ended, or was ended, before it was done. verdict: `dead`, `hung` or `stopped`."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class Worker:
    """A worker process and the pipes to it. environment: what it has besides that of the setup."""

    def __init__(self, setup: Setup, deadline: float, environment: dict[str, str]) -> None:
        self._setup, self._deadline = setup, deadline
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        own = {"PYTHONPATH": path, "BLOCKTUNE_MISSES": "off", **COMPILER}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | own | setup.environment | environment,
        )
        self._unread = b""
        try:
            self.send({"device": setup.device, "subject": setup.subject, "pretend": setup.pretend})
            self.answer(setup.start_timeout_s)
        except Ended:
            self.close()
            raise

    def send(self, document: Record) -> None:
        """Raises:
        Ended: the worker does not listen.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, timeout_s: float) -> Record:
        """The next line of the worker.

        Raises:
            Ended: there is none in time, or none any more.
        """
        until = min(time.monotonic() + timeout_s, self._deadline)
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                if time.monotonic() >= self._deadline:
                    raise Ended("stopped", "the time is up")
                raise Ended("hung", f"no answer within {timeout_s:.0f} s")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._ended()
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        document: Record = json.loads(line)
        return document

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._errors.close()

    def _ended(self) -> Ended:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        said = "\n".join(line for line in lines if not line.startswith("frame #"))  # of C++, where it was raised
        return Ended("dead", f"the process ended with {code}: {said[-MESSAGE_CHARACTERS:]}")


def _outcome_of_death(ended: Ended, raised: Record | None) -> Record:
    """How a case has ended whose worker has: raised is what ours raised before PyTorch was asked."""
    if raised is None or ended.verdict != "dead":
        return {"verdict": ended.verdict, "message": str(ended)}
    return {"verdict": "pytorch_dead", "message": f"ours {raised['message']}; PyTorch: {ended}"}


def _gpus() -> list[str]:
    """The GPUs that workers take in turns; none where the user has chosen some, or there is one."""
    nvml = None if VISIBLE in os.environ else Nvml.open()
    if nvml is None:
        return []
    try:
        found = [gpu.uuid for gpu in nvml.gpus() if gpu.uuid is not None]
    finally:
        nvml.close()
    return found if len(found) > 1 else []


class Pool:
    """Runs jobs in `count` workers at once until there are none, or the time is up. A worker that ends is replaced, and
    the new one goes on after the case that was running.

    report is called for every case that ended, by one thread at a time: {"case": ..., "verdict": ..., ...}.
    """

    def __init__(self, setup: Setup, count: int, deadline: float, report: Callable[[Record], None]) -> None:
        self._setup, self._count, self._deadline, self._report = setup, count, deadline, report
        self._lock = threading.Lock()
        self.problems: list[str] = []
        """Why workers could not be started, or died outside a case."""

    def run(self, jobs: Iterator[Record]) -> None:
        """Runs the jobs, as far as the time goes."""
        gpus = _gpus() if self._setup.device == "cuda" else []
        taken = [{VISIBLE: gpus[place % len(gpus)]} if gpus else {} for place in range(self._count)]
        threads = [threading.Thread(target=self._serve, args=(jobs, own), daemon=True) for own in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, jobs: Iterator[Record], environment: dict[str, str]) -> None:
        worker: Worker | None = None
        job: Record | None = None
        failures = 0
        while failures < MAX_FAILURES:
            with self._lock:
                job = job or next(jobs, None)
            if job is None or time.monotonic() >= self._deadline:
                break
            try:
                worker = worker or Worker(self._setup, self._deadline, environment)
                job = self._run(worker, job)
                failures = 0
                if job is None:
                    continue  # done, and the worker is ready for the next one
            except Ended as ended:
                if ended.verdict == "stopped":
                    break
                failures += 1
                with self._lock:
                    self.problems.append(str(ended))
            if worker is not None:
                worker.close()
            worker = None
        if worker is not None:
            worker.close()

    def _run(self, worker: Worker, job: Record) -> Record | None:
        """Runs a job. Returns what is left of it if the worker has ended on the way.

        Raises:
            Ended: the worker has ended outside a case, or the time is up.
        """
        worker.send(job)
        begun: Record | None = None
        raised: Record | None = None
        while True:
            try:
                answer = worker.answer(self._setup.timeout_s)
                if "dead" in answer:
                    raise Ended("dead", answer["message"])
            except Ended as ended:
                if begun is None or ended.verdict == "stopped":
                    raise
                self._say(job, begun, _outcome_of_death(ended, raised))
                return job | {"first": begun["begin"] + 1}
            if "begin" in answer:
                begun, raised = answer, None
            elif "raised" in answer:
                raised = answer
            elif "end" in answer:
                assert begun is not None
                self._say(job, begun, answer)
                begun = None
            elif "done" in answer:
                return None

    def _say(self, job: Record, begun: Record, answer: Record) -> None:
        outcome = {name: value for name, value in answer.items() if name != "end"}
        with self._lock:
            number = {"number": job["number"] + begun["begin"]} if "number" in job else {}
            self._report({"case": begun["case"]} | number | outcome)
