"""Compiles nothing ahead of a job: landscape_ahead_worker.py FOLDER

It leaves what a compile would: a kernel of Triton's cache, named after the job and the part, and a result. FOLDER/log
gets a line for each, and FOLDER/script.json says of which batch the process dies (`ahead_dies`).
"""

import json
import os
import signal
import sys
from pathlib import Path

from blocktune.tuner.fleet.job import Job

if __name__ == "__main__":
    home, asked = Path(sys.argv[1]), json.loads(sys.stdin.readline())
    job, folder = Job.from_json(asked["job"]), Path(asked["folder"])
    name = f"kernel-{job.shape.batch}-{asked['part']}"
    if job.shape.batch in json.loads((home / "script.json").read_text()).get("ahead_dies", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    kernel = Path(os.environ["TRITON_CACHE_DIR"]) / name
    kernel.mkdir(parents=True)
    (kernel / "code.cubin").write_text(name)
    (kernel / "__grp__code.json").write_text(json.dumps({"child_paths": {"code.cubin": str(kernel / "code.cubin")}}))
    (folder / "resources").mkdir()
    (folder / "resources" / f"{name}.json").write_text(json.dumps({"outcome": "ok"}))
    with (home / "log").open("a") as log:
        log.write(f"compiled {name} on {os.environ['LANDSCAPE_DEVICE']}\n")
    sys.stdout.write(json.dumps({"compiled": 1}) + "\n")
