"""One worker process that compiles, seen from the parent."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from blocktune.tuner.compile.child_process import Child, ChildLostError
from blocktune.tuner.compile.diagnostics import with_diagnostics

START_TIMEOUT_S = 120.0
"""A worker imports Triton before its first job; on a cold network disk that takes long."""


class CompileProcess(Child):
    """A worker that compiles kernels of a source.

    Args:
        kernels: the source, which the worker makes sense of.
        worker: the module that the worker runs.
        environment: of the worker; None is that of this process.
    """

    def __init__(
        self,
        kernels: str,
        *,
        worker: str = "blocktune.tuner.compile.worker",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._worker = worker
        # -P: a folder that happens to be called `triton` where the user stands is not imported.
        command = [sys.executable, "-P", "-m", worker, kernels, str(os.getpid())]
        super().__init__(command, os.environ if environment is None else environment)

    def wait_until_ready(self) -> None:
        """Wait until the worker takes jobs.

        Raises:
            RuntimeError: it does not come up; the message has what it said.
        """
        try:
            self.receive(START_TIMEOUT_S)
        except ChildLostError as lost:
            said = lost.last_words or "it said nothing"
            raise RuntimeError(
                f"The compile worker did not start within {START_TIMEOUT_S:.0f} s: {said}. Try `python -P -c 'import "
                f"{self._worker}'`."
            ) from None

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the worker's answer to a message, with the compiler's messages about code that it rejects.

        Raises:
            ChildLostError: the worker gives no answer and cannot be used any longer.
        """
        self.errors.forget()
        self.send(message)
        return with_diagnostics(self.receive(timeout_s), self.errors.words())
