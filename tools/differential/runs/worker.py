"""A process that runs cases: jobs come in as lines of JSON, and what became of every case goes out as lines of JSON.

A job is {"kind": class, "seed": number, "count": cases} or {"case": case}, and may have a "first": cases before that
one have run. Out go {"begin": index, "case": ...} before a case, {"raised": index, "message": ...} where ours raises
and PyTorch is asked, {"end": index, ...outcome} after the case, and {"done": count} after a job. An error that ends the
CUDA context is the last line: {"dead": index, "message": ...}.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection import pytorch_rival

DEAD = 3
"""The exit code of a process whose CUDA context is lost."""


MEMORY_SHARE = 0.05
"""Of the GPU's memory, for a process: cases are small, and 16 share a GPU."""


class ContextLost(Exception):
    """The CUDA context has ended, with what it said."""


def main() -> int:
    """Serves jobs until there are none."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes where errors go
    setup = json.loads(sys.stdin.readline())
    server = Server(setup, answers)
    for line in sys.stdin:
        try:
            server.serve(json.loads(line))
        except ContextLost as error:
            server.say({"dead": server.index, "message": str(error)})
            os._exit(DEAD)  # nothing of CUDA can be taken down in order
    return 0


def _no_reason(shape: AttentionShape, device_key: str) -> str | None:
    del shape, device_key
    return None


class Server:
    """Runs jobs on a device. setup: {"device": "cuda" or "cpu", "subject": a module, "pretend": a device or ""}."""

    def __init__(self, setup: dict[str, Any], answers: TextIO) -> None:
        import torch

        self.index = -1
        self._answers = answers
        self._device = torch.device(setup["device"])
        if setup["pretend"]:
            from tools.differential.runs.pretence import pretend

            pretend(setup["pretend"])
        self._subject: Any = importlib.import_module(setup["subject"])
        pytorch_rival.reason_for_pytorch = _no_reason  # kernels are checked also where PyTorch's are faster
        torch.set_num_threads(1)
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
        self.say({"ready": os.getpid()})

    def say(self, document: dict[str, Any]) -> None:
        self._answers.write(json.dumps(document) + "\n")
        self._answers.flush()

    def serve(self, job: dict[str, Any]) -> None:
        """Runs the cases of a job.

        Raises:
            ContextLost: a case has ended the CUDA context.
        """
        from tools.differential.runs.served import ServedBy

        served = ServedBy()
        count = 0
        for self.index, case in _cases(job):
            self.say({"begin": self.index, "case": case.to_json()})
            started = time.monotonic()
            answer = self._run(case).to_json() | {"served": served.since_last()}
            failed = served.failed_launches()
            answer |= {"failed_launches": failed} if failed else {}
            self.say({"end": self.index, "seconds": round(time.monotonic() - started, 4)} | answer)
            count += 1
        self.say({"done": count})

    def _print_error(self, message: str) -> None:
        self.say({"raised": self.index, "message": message})

    def _run(self, case: Any) -> Any:
        import torch

        from tools.differential.runs.runner import Outcome, is_lost, run_case
        from tools.differential.truth.verdict import Verdict

        try:
            outcome = run_case(case, self._device, self._subject, self._print_error)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return Outcome(Verdict.OUT_OF_MEMORY, str(error)[:200])
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:600]
            if is_lost(self._device):
                raise ContextLost(said) from error
            return Outcome(Verdict.BROKEN, said)
        if is_lost(self._device):
            raise ContextLost("a kernel of the case has ended the context")
        return outcome


def _cases(job: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """The cases of a job with their numbers."""
    from tools.differential.cases.case import Case, class_from_json
    from tools.differential.cases.strategies import drawn_cases

    if "case" in job:
        if not job.get("first"):
            yield 0, Case.from_json(job["case"])
        return
    yield from drawn_cases(class_from_json(job["kind"]), job["seed"], job["count"], job.get("first", 0))


if __name__ == "__main__":
    sys.exit(main())
