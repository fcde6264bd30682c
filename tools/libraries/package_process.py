"""A program of this folder as a process of its own, with one package and with caches of its own.

FOLDER has a folder for each package, `pip install --target FOLDER/NAME --no-deps NAME`, and `deps` for what they need.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import ROOT, program
from tools.libraries.starts import caches_in

MAX_ERROR = 300


def run_program(
    words: Sequence[str], paths: Sequence[Path], caches: Path, seconds: float, variables: Mapping[str, str] = {}
) -> tuple[list[dict[str, Any]], str]:
    """Run a program of this folder and return the objects that it prints, a line each, and its error.

    Args:
        words: its name and arguments.
        paths: of packages that it imports.
        caches: the folder of its caches and of its store.
        seconds: until it is ended.
        variables: further ones of its environment.
    """
    caches.mkdir(exist_ok=True)
    environment = {**os.environ, **caches_in(str(caches)), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    environment |= {"FLAGGEMS_CACHE_DIR": str(caches / "flag-gems"), "GEMS_VENDOR": "nvidia", "BLOCKTUNE_AUTOTUNE": "0"}
    path = os.pathsep.join(filter(None, (*map(str, paths), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, **variables}
    process = subprocess.Popen(
        [*program(f"libraries.{words[0]}"), *words[1:]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    problem = ""
    try:
        out, error = process.communicate(timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        out, error = process.communicate()
        problem = f"it took longer than {seconds:.0f} s"
    if process.returncode and not problem:
        problem = error.strip().rpartition("\n")[2][:MAX_ERROR] or f"its process ended with {process.returncode}"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], problem


def paths_of(folder: Path, packages: Sequence[str]) -> list[Path]:
    """Return what has to be on the path for packages of a folder."""
    return [folder.resolve() / name for name in (*packages, "deps")]
