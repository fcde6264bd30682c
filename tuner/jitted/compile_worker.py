"""The child process that compiles autotuned kernels: `python -m blocktune.tuner.jitted.compile_worker any PARENT`.

It speaks the protocol of `tuner/compile/worker.py`. A job names the kernel, what to compile and under which key Triton
keeps that; where this process sees another source under the name, it compiles nothing and says so.

    {"kernel": "module:function", "spec": {…}, "key": "…", "cc": [9, 0], "timeout_s": 60}
"""

import sys
from typing import Any

from blocktune.tuner.compile.answers import private_stdout
from blocktune.tuner.compile.compiler import compile_key, compiled_code, resources_of
from blocktune.tuner.compile.worker import die_with_parent, serve
from blocktune.tuner.jitted.specialization import function_named, spec_of


def compile_job(job: dict[str, Any]) -> dict[str, Any]:
    """Return the resources of what a job compiles; None where the caller has another source, or found it on a path that
    it has taken since this process was started."""
    try:
        function = function_named(job["kernel"])
    except Exception:  # libraries raise what they like when they are imported; the caller has imported this one
        return {"resources": None}
    spec, cc = spec_of(function, job["spec"]), tuple(job["cc"])
    same = compile_key(spec, cc) == job["key"]
    return {"resources": resources_of(compiled_code(spec, cc)).to_json() if same else None}


def main(arguments: list[str]) -> None:
    _, parent = arguments
    die_with_parent(int(parent))
    results = private_stdout()
    serve(compile_job, sys.stdin, results)


if __name__ == "__main__":
    main(sys.argv[1:])
