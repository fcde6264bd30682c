"""The farm: one harmful compile costs one result and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile.diagnostics import diagnostics_in
from blocktune.tuner.compile_server import client
from blocktune.tuner.compile_server.farm import CompileFarm, default_workers
from tests.support.fakes.faked_compiles import faked_compiles

MakeFarm = Callable[..., CompileFarm]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return faked_compiles(monkeypatch, tmp_path)


@pytest.fixture
def children() -> Callable[[], list[int]]:
    """Lists the servers that this process has started since. Autotuned kernels of earlier tests may have left one."""
    before = all_children()
    return lambda: [pid for pid in all_children() if pid not in before]


@pytest.fixture
def make_farm(fakes: Any, tmp_path: Path, children: Callable[[], list[int]]) -> Iterator[MakeFarm]:
    """A farm whose worker processes are all gone when the test ends."""
    farms: list[CompileFarm] = []

    def make(**options: Any) -> CompileFarm:
        given = {
            "workers": 1,
            "cache": ResourceCache(tmp_path / "cache"),
            "kernels": "tests.support.fakes.compile_fakes:get_kernel",
        }
        farms.append(CompileFarm(**given | options))
        return farms[-1]

    yield make
    for farm in farms:
        farm.close()
    assert children() == []


def all_children() -> list[int]:
    """The servers of this process."""
    while True:
        try:
            return listed_children()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread or a process ended while it was looked at


def listed_children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if "compile_server.server" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(int(pid))
    return found


def gone(pid: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def read_pids(path: Path, within_s: float = 60.0) -> list[int]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return [int(pid) for pid in text.split()]
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def submit(farm: CompileFarm, fakes: Any, name: str, cc: tuple[int, int] = (9, 0)) -> "Future[CompileResult]":
    return farm.submit(name, fakes.config(name), fakes.SHAPE, cc)


@pytest.mark.exhaustive
def test_farm_harmful_compiles_cost_one_result_each(make_farm: MakeFarm, fakes: Any) -> None:
    farm = make_farm()
    names = ("chatty", "aborting", "product", "killed", "broken", "product")
    results = [submit(farm, fakes, name, (8, 0)).result() for name in names]
    assert [result.outcome for result in results] == [
        Outcome.OK,
        Outcome.COMPILE_ERROR,
        Outcome.OK,
        Outcome.COMPILE_ERROR,
        Outcome.COMPILE_ERROR,
        Outcome.OK,
    ]
    assert "SIGABRT" in results[1].error
    assert "Assertion `layout' failed." in results[1].error
    assert "SIGKILL" in results[3].error
    assert "BLOCK_M is too small" in results[4].error
    assert results[5].cached
    assert not results[2].cached
    assert results[5].resources == results[2].resources


def test_farm_an_error_has_what_the_compiler_printed(make_farm: MakeFarm, fakes: Any) -> None:
    result = submit(make_farm(), fakes, "rejected").result()
    assert result.outcome is Outcome.COMPILE_ERROR
    assert result.error == "RuntimeError: error encountered during parsing: warps.py:136:11: sizes differ"


def test_diagnostics_are_the_errors_each_once() -> None:
    line = "/a/warps.py:136:11: error: source and result must have the same size\n    out = reinterpret()\n"
    assert diagnostics_in(f"a warning\n{line}{line}/b.py:1:2: error: no\n/b.py:1:2: note: see") == (
        "warps.py:136:11: source and result must have the same size; b.py:1:2: no"
    )


@pytest.mark.exhaustive
def test_farm_timeout_kills_the_compiler_s_child_too(make_farm: MakeFarm, fakes: Any, tmp_path: Path) -> None:
    farm = make_farm(timeout_s=3)
    result = submit(farm, fakes, "sleeping").result()
    assert result.outcome is Outcome.COMPILE_TIMEOUT
    assert "3 s" in result.error
    assert all(gone(pid) for pid in read_pids(tmp_path / "pids"))


def test_farm_what_it_remembers(make_farm: MakeFarm, fakes: Any, tmp_path: Path) -> None:
    patient, hasty = make_farm(), make_farm(timeout_s=0.5)
    ended = [submit(patient, fakes, name).result() for name in ("aborting", "broken", "killed")]
    ended.append(submit(hasty, fakes, "sleeping").result())
    assert not any(result.cached for result in ended)
    assert [result.transient for result in ended] == [False, False, True, False]
    remembered = [ResourceCache(tmp_path / "cache").get(path.stem) for path in (tmp_path / "cache").glob("*.json")]
    assert sorted(result.config.kernel for result in remembered if result) == ["aborting", "broken"]


def test_farm_a_compile_ahead_is_taken_over_and_not_begun_again(
    make_farm: MakeFarm, fakes: Any, tmp_path: Path
) -> None:
    farm = make_farm()
    running = submit(farm, fakes, "sleeping")
    read_pids(tmp_path / "pids")
    farm.submit_ahead("product", fakes.config("product"), fakes.SHAPE, (9, 0))
    behind = submit(farm, fakes, "broken")
    ahead = submit(farm, fakes, "product")
    farm.abort(running)
    behind.result()
    assert ahead.done()
    assert ahead.result().outcome is Outcome.OK
    assert submit(farm, fakes, "product").result().cached


def test_farm_close_cancels_all_and_leaves_no_process(make_farm: MakeFarm, fakes: Any, tmp_path: Path) -> None:
    farm = make_farm()
    running, pending, dropped = (submit(farm, fakes, "sleeping") for _ in range(3))
    assert dropped.cancel()
    pids = read_pids(tmp_path / "pids")
    farm.close()
    with pytest.raises(CancelledError):
        running.result(timeout=0)
    with pytest.raises(CancelledError):
        pending.result(timeout=0)
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="farm is closed"):
        submit(farm, fakes, "product")


def test_farm_results_come_as_they_are_ready(make_farm: MakeFarm, fakes: Any) -> None:
    farm = make_farm(workers=2)
    slow, quick = submit(farm, fakes, "sleeping"), submit(farm, fakes, "product", (8, 0))
    assert next(as_completed([slow, quick])).result().outcome is Outcome.OK
    assert not slow.done()


def test_farm_need_code_compiles_again_when_triton_s_cache_is_empty(
    make_farm: MakeFarm, fakes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not submit(make_farm(), fakes, "product").result().cached
    assert submit(make_farm(need_code=True), fakes, "product").result().cached
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert submit(make_farm(), fakes, "product").result().cached
    assert not submit(make_farm(need_code=True), fakes, "product").result().cached


def test_farm_without_a_process_that_compiles_raises_what_it_said(
    make_farm: MakeFarm, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SERVER", "no.such.module")
    with pytest.raises(RuntimeError, match="No module named 'no'"):
        submit(make_farm(), fakes, "product").result()


def test_farm_kernels_that_cannot_be_imported_are_the_machines_fault(
    make_farm: MakeFarm, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    farm = make_farm()
    monkeypatch.setattr(farm, "_kernels", "no.such_module:get_kernel")
    result = submit(farm, fakes, "product").result()
    assert (result.outcome, result.transient) == (Outcome.COMPILE_ERROR, True)
    assert "No module named 'no'" in result.error


def test_farm_a_process_that_is_lost_costs_its_jobs_and_is_replaced(
    make_farm: MakeFarm, fakes: Any, tmp_path: Path, children: Callable[[], list[int]]
) -> None:
    farm = make_farm()
    running = submit(farm, fakes, "sleeping")
    pids = read_pids(tmp_path / "pids")
    (server,) = children()
    os.kill(server, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="SIGKILL"):
        running.result()
    assert all(gone(pid) for pid in pids)
    assert submit(farm, fakes, "product").result().outcome is Outcome.OK


def test_farm_a_compile_that_has_begun_is_not_cancelled(make_farm: MakeFarm, fakes: Any, tmp_path: Path) -> None:
    farm = make_farm()
    running = submit(farm, fakes, "sleeping")
    read_pids(tmp_path / "pids")
    assert not running.cancel()
    assert running.running()


def test_farm_its_process_is_ready_before_the_first_job(
    make_farm: MakeFarm, fakes: Any, children: Callable[[], list[int]]
) -> None:
    farm = make_farm()
    farm.start()
    deadline = time.monotonic() + 60
    while not children() and time.monotonic() < deadline:
        time.sleep(0.02)
    (before,) = children()
    assert submit(farm, fakes, "product").result().outcome is Outcome.OK
    assert children() == [before]


def test_farm_abort_ends_one_compile_and_no_other(make_farm: MakeFarm, fakes: Any, tmp_path: Path) -> None:
    farm = make_farm()
    running, waiting, last = (submit(farm, fakes, name) for name in ("sleeping", "sleeping", "product"))
    pids = read_pids(tmp_path / "pids")
    farm.abort(waiting)
    assert waiting.cancelled()
    farm.abort(running)
    assert running.result().outcome is Outcome.COMPILE_ERROR
    assert "SIGKILL" in running.result().error
    assert all(gone(pid) for pid in pids)
    assert last.result().outcome is Outcome.OK
    farm.abort(last)
    assert submit(farm, fakes, "product").result() == replace(last.result(), cached=True)
    remembered = [ResourceCache(tmp_path / "cache").get(path.stem) for path in (tmp_path / "cache").glob("*.json")]
    assert [result.config.kernel for result in remembered if result] == ["product"]


PARENT = """
import os
os.environ["BLOCKTUNE_TEST_PID"] = str(os.getpid())
from pathlib import Path
from blocktune.tuner.compile.diagnostics import diagnostics_in
from blocktune.tuner.compile_server import client
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.compile.cache import ResourceCache
from tests.support.fakes import compile_fakes
kernels = "tests.support.fakes.compile_fakes:get_kernel"
farm = CompileFarm(workers=1, cache=ResourceCache(Path("cache")), kernels=kernels)
farm.submit("sleeping", compile_fakes.config("sleeping"), compile_fakes.SHAPE, (9, 0)).result()
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fakes")
def test_farm_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", PARENT], cwd=tmp_path) as parent:
        pids = read_pids(tmp_path / "pids")
        parent.send_signal(signal.SIGKILL)
    assert all(gone(pid) for pid in pids)


def test_default_workers_is_at_least_one_and_no_more_than_the_processors() -> None:
    assert 1 <= default_workers() <= len(os.sched_getaffinity(0))
