"""A process that starts and runs one training step of a library's operators; and such processes, timed.

python -m tools.libraries.starts MODEL TUNER     prints the seconds of the imports and of the step
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tools import ROOT, program

TUNERS = ("stock", "blocktune")


def caches_in(folder: str) -> dict[str, str]:
    """Return the variables that put the caches and the store of a process into a folder."""
    return {
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "BLOCKTUNE_DB": f"{folder}/store.db",
        "XDG_CACHE_HOME": f"{folder}/cache",
    }


def started(model: str, tuner: str, folder: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*program("libraries.starts"), model, tuner],
        env={**os.environ, **caches_in(folder), "BLOCKTUNE_AUTOTUNE": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def answer_of(process: "subprocess.Popen[str]", seconds: float) -> dict[str, Any] | None:
    """Return what a process says; where it takes longer than this, when its step began, or None if that did not.

    Raises:
        RuntimeError: it fails.
    """
    late = False
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        out, error = process.communicate()
    if process.returncode and not late:
        raise RuntimeError(f"A start must end well, but this one did not: {error[-2000:]}")
    found: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return found[-1] if found else None


def timed_start(model: str, tuner: str, folder: str, seconds: float) -> dict[str, Any]:
    """Return the seconds of one start, which may take this many; of the step they are None where it fails, or takes
    longer than `longest_seconds`."""
    begun, error, answer = time.monotonic(), "", None
    try:
        answer = answer_of(started(model, tuner, folder), seconds)
    except RuntimeError as failed:
        error = str(failed)
    found, now = answer or {}, time.monotonic()
    return {
        "process_seconds": now - begun,
        "import_seconds": found.get("import_seconds"),
        "step_seconds": found.get("step_seconds"),
        "longest_seconds": now - found.get("step_began", now),
        "tuned": found.get("tuned"),
        "error": error,
    }


def agreement(model: str, count: int, seconds: float) -> dict[str, Any]:
    """Return how many processes that start at once tune each kernel, and how many kernels they disagree on."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        processes = [started(model, "blocktune", folder) for _ in range(count)]
        answers, errors = list[dict[str, Any] | None](), list[str]()
        for process in processes:
            try:
                answers.append(answer_of(process, max(1.0, seconds - time.monotonic() + begun)))
            except RuntimeError as failed:
                errors.append(str(failed))
    ended = [answer for answer in answers if answer is not None and "choices" in answer]
    chosen = {key: {answer["choices"].get(key) for answer in ended} for answer in ended for key in answer["choices"]}
    return {
        "processes": count,
        "ended": len(ended),
        "kinds_of_calls": len(chosen),
        "tuned_in_all": sum(answer["tuned"] for answer in ended),
        "disagreements": sum(len(configs) > 1 for configs in chosen.values()),
        "seconds": max((answer["step_seconds"] for answer in ended), default=None),
        "errors": errors,
    }


def choices() -> Mapping[str, str]:
    """Return what each kind of call of this process was launched with."""
    from blocktune.runtime.autotuned.kernel import kernels

    return {
        f"{kernel.name} {problem.document}": choice.label
        for kernel in kernels
        for problem, choice in kernel.choices.items()
    }


def main(model: str, tuner: str) -> None:
    import torch

    from tests.support.libraries.steps import LIBRARIES, model_step

    if tuner == "blocktune":
        import blocktune

        blocktune.install()
    torch.zeros(1, device="cuda")
    begun = time.monotonic()
    for name in LIBRARIES[model]:
        import_module(name)
    imported = time.monotonic()
    times = {"import_seconds": imported - begun, "step_began": imported}
    sys.stdout.write(json.dumps(times) + "\n")  # which is the answer of a process that does not end in time
    sys.stdout.flush()
    model_step(model, "cuda")
    torch.cuda.synchronize()
    seconds, chosen, tuned = time.monotonic() - imported, {}, 0
    if tuner == "blocktune":
        from blocktune.runtime.autotuned.kernel import kernels

        chosen, tuned = dict(choices()), sum(choice.tuned for kernel in kernels for choice in kernel.choices.values())
    sys.stdout.write(json.dumps({**times, "step_seconds": seconds, "choices": chosen, "tuned": tuned}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
