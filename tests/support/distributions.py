"""Wheels and source archives of this project, and environments that they are installed in."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDERS = ("cli", "db", "kernels", "results", "tuner")
"""Folders at the top, which a build must not take up."""
TAKEN = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "blocktune", *FOLDERS)
"""What a copy for the build needs, and the folders at the top."""


def unpacked_zip(folder: Path) -> Path:
    """Return a copy as a ZIP download or a checkout without links has it: nothing is a link."""
    source = folder / "blocktune-main"
    source.mkdir()
    for name in TAKEN:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    return source


def source_archive(source: Path, folder: Path) -> Path:
    """Return the archive that setuptools makes of a copy of the sources."""
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    return folder / built.stdout.split()[-1]


def pip(*words: str | Path) -> None:
    """Run pip without a network and without the settings of this machine."""
    told = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    command = [sys.executable, "-P", "-m", "pip", *words]
    done = subprocess.run(
        command, env=told | {"PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def wheel_of(source: Path, folder: Path) -> Path:
    """Return the wheel that pip builds of a folder or an archive."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def linked_environment(folder: Path, *names: str) -> Path:
    """Return the Python of a new environment that has these packages of ours and what they need, by links."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in needed_by(*names):
        distribution = metadata.distribution(name)
        tops = {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (packages / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


def needed_by(*names: str) -> set[str]:
    """Return the packages and all that they need, as far as they are installed."""
    found, left = set[str](), list(names)
    while left:
        name = left.pop()
        if name.lower() in found or not any(metadata.distributions(name=name)):
            continue
        found.add(name.lower())
        wanted = map(Requirement, metadata.requires(name) or ())
        left += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found
