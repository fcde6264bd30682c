"""A worker as `blocktune.tuner.fleet.worker` that tunes nothing: fake_job_worker.py FOLDER

FOLDER/script.json says by a job's batch, or by the GPU that this process was given, what it does with a job; FOLDER/log
gets a line for each job that is begun, FOLDER/ready one for each that may be interrupted from now on, and FOLDER/heard
one for each interrupt that did not end its job.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = {"kernel": "flash_fwd", "block_m": 128, "block_n": 64, "num_warps": 4, "num_stages": 3}


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def progress(done: int) -> None:
    values = {"phase": "search", "done": done, "total": 4, "compiled": 0, "outcomes": {"ok": done}, "best": None}
    say(
        progress=values
        | {"best_us": None, "elapsed_seconds": 0.0, "eta_seconds": None, "message": "", "measuring": None}
    )


def report(job: dict[str, Any], *, interrupted: bool = False) -> None:
    """As much of a report as is read of it."""
    best = {"config": CONFIG, "origin": "measured", "time_us": 812.5, "predicted_us": None}
    shape = {"label": f"shape {job['shape']['batch']}"}
    facts = {"best": best, "shape": shape, "speedup_over_default": None, "outcomes": {"ok": 4}, "seconds": 0.1}
    say(report=facts | {"interrupted": interrupted, "gpu": GPU})


def note(name: str, line: object) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(f"{line}\n")


def make(job: dict[str, Any], action: str) -> None:
    if action != "wait":
        progress(1)
    if action == "die":
        print("out of luck", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "babble":
        print("Welcome!", flush=True)
    elif action == "fail":
        say(error="nothing fits", exit_code=3)
    elif action == "wait":
        try:
            progress(1)
            note("ready", os.getpid())
            time.sleep(60)
        except KeyboardInterrupt:
            report(job, interrupted=True)
    elif action == "deaf":
        signal.signal(signal.SIGINT, lambda number, frame: note("heard", os.getpid()))
        progress(2)
        note("ready", os.getpid())
        time.sleep(60)
    else:
        time.sleep(float(action))
        report(job)


GPU = os.environ["CUDA_VISIBLE_DEVICES"]
FOLDER = Path(sys.argv[1])

signal.signal(signal.SIGINT, signal.default_int_handler)
for line in sys.stdin:
    job = json.loads(line)
    script = json.loads((FOLDER / "script.json").read_text())
    batch = str(job["shape"]["batch"])
    note("log", f"{GPU} {os.environ['BLOCKTUNE_PROCESSORS']} {batch} {os.getpid()}")
    make(job, script.get(GPU) or script.get(batch) or "0")
