"""`tune diff MODULE:KERNEL`: another version of a kernel, from git or a file, next to today's."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.triton_modes import compiled_here

pytestmark = compiled_here

KERNEL = "diffed_kernels:scale_kernel"
TEXT = """
import torch
import triton
from triton import language as tl


@triton.autotune(configs=[triton.Config({{"BLOCK": block}}, num_warps=2) for block in (128, 256)], key=["n"])
@triton.jit
def scale_kernel(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    {store}


def make(n):
    return {{"x": torch.ones(n), "n": n, "grid": lambda meta: (triton.cdiv(n, meta["BLOCK"]),)}}
"""
DOUBLED = "tl.store(x + offsets, 2 * tl.load(x + offsets, offsets < n), offsets < n)"
ROOTS = "tl.store(x + offsets, tl.sqrt(tl.load(x + offsets, offsets < n)), offsets < n)"


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Return a function that writes the kernel's module in the working folder and makes the next import read it."""
    monkeypatch.chdir(tmp_path)

    def write(store: str) -> Path:
        sys.modules.pop("diffed_kernels", None)
        path = tmp_path / "diffed_kernels.py"
        path.write_text(TEXT.format(store=store))
        return path

    yield write
    sys.modules.pop("diffed_kernels", None)


def run(tune: Any) -> None:
    done = tune("run", KERNEL, "--args", "diffed_kernels:make", "--grid", "n=1000")
    assert done.exit_code == 0, done.output


def commit(path: Path) -> None:
    for command in (["init", "-q"], ["add", path.name], ["commit", "-q", "-m", "as it was"]):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *names, *command], cwd=path.parent, check=True)


def test_a_revision_is_compared_with_today(tune: Any, write: Callable[[str], Path], gpu: Any) -> None:
    commit(write(DOUBLED))
    run(tune)
    write(ROOTS)
    gpu.time_us = lambda launch: 50.0 + launch.arguments["BLOCK"]
    run(tune)
    shown = tune("diff", KERNEL, "HEAD", "--device", "h200")
    assert shown.exit_code == 0, shown.output
    assert f"-    {DOUBLED}" in shown.stdout
    assert f"+    {ROOTS}" in shown.stdout
    text = words(shown.stdout)
    assert "time of the winner 110.0 µs 178.0 µs" in text
    assert "config scale_kernel BLOCK=256 num_stages=3 num_warps=2 scale_kernel BLOCK=128" in text
    assert "same machine code" not in text
    (key,) = json.loads(tune("diff", KERNEL, "HEAD", "--device", "h200", "--json").stdout)["keys"]
    roots = [key[which]["instructions"]["special function"] for which in ("before", "after")]
    assert roots[0] == 0 < roots[1]


def test_a_file_with_the_same_code_says_so(tune: Any, write: Callable[[str], Path], tmp_path: Path) -> None:
    other = tmp_path / "older.py"
    other.write_text(
        TEXT.format(store="y = tl.load(x + offsets, offsets < n); tl.store(x + offsets, y * 2, offsets < n)")
    )
    write(DOUBLED)
    run(tune)
    text = words(tune("diff", KERNEL, other, "--device", "h200").stdout)
    assert "time of the winner - 110.0 µs" in text
    assert "Both compile to the same machine code." in text


def test_arguments_that_changed_leave_a_version_without_code(
    tune: Any, write: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tmp_path / "older.py"
    other.write_text(write(DOUBLED).read_text().replace("(x, n, BLOCK", "(x, y, n, BLOCK"))
    run(tune)
    shown = tune("diff", KERNEL, other, "--device", "h200")
    assert "registers -" in words(shown.stdout)
    assert "older.py: The stored key tells the types of" in words(shown.stdout)


def test_without_winners_sources_are_compared(tune: Any, write: Callable[[str], Path], tmp_path: Path) -> None:
    other = tmp_path / "older.py"
    other.write_text(write(DOUBLED).read_text())
    shown = tune("diff", KERNEL, other, "--device", "h200")
    assert f"{KERNEL} has the same source in" in words(shown.stdout)
    assert "No winner of either version is known on NVIDIA H200" in words(shown.stderr)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((KERNEL, "HEAD~7"), "HEAD~7 is neither a file nor a git revision"),
        ((KERNEL, "broken.py"), f"{KERNEL} of broken.py cannot be loaded: ZeroDivisionError"),
        ((KERNEL, "empty.py"), f"{KERNEL} of empty.py cannot be loaded: AttributeError"),
        (("no.module:f", "HEAD"), "no.module:f cannot be imported"),
        (("broken.py", "empty.py", "--device", "h200"), "`--device` is of MODULE:KERNEL"),
    ],
)
def test_wrong_use_is_refused(tune: Any, write: Callable[[str], Path], command: tuple[str, ...], message: str) -> None:
    write(DOUBLED)
    Path("broken.py").write_text("1 / 0\n")
    Path("empty.py").write_text("")
    done = tune("diff", *command)
    assert done.exit_code == 2, done.output
    assert message in words(done.stderr)
