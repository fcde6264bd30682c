"""Measures what a reader of the report and of the live page waits for: `python -m tools.bench.ui_bars`.

It writes results/cpu.ui.json, of which `make results` makes a table, and needs a browser and a few minutes. Processor
time is that of the server and its compiles alone, so that a busy machine does not change it much.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from blocktune.cli.ui.live_store import LiveStore
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.lab.sweep_file import load_sweep
from tests.support.pages.browser import Page, chromium
from tests.support.pages.reports import DENSE
from tests.support.stores.large_stores import multiplied_trials
from tools import RECORDS, SHIPPED
from tools.pages.recorded.ui_tables import FORMAT, SCHEMA

SHAPES = 1737
"""Of 576 trials each: a million and a few."""

LOADS = 5
TILE = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}


def main() -> None:
    """Measure everything and write the file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [*_report(folder), *_live(folder)]
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 2),
        "python": platform.python_version(),
        "rows": rows,
    }
    path = RECORDS / "cpu.ui.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _row(name: str, bar: str, value: float, unit: str, cpu_s: float | None = None) -> dict[str, Any]:
    print(f"{name}: {value:.3f} {unit}, processor {cpu_s}")
    return {"name": name, "bar": bar, "value": round(value, 3), "unit": unit, "cpu_s": cpu_s and round(cpu_s, 3)}


def _report(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the size of the report of results/, and when a browser first paints it."""
    path = folder / "report.html"
    subprocess.run((*_tune(), "report", *map(str, (RECORDS, SHIPPED)), "--out", str(path)), check=True)
    yield _row("the report of all of results/", "3 MB", path.stat().st_size / 1e6, "MB")
    with chromium() as browser:
        page = Page(browser, path)
        painted_ms = []
        for _ in range(LOADS):
            page.page.reload()
            page.settle()
            painted_ms.append(page.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    yield _row(f"its first paint, the median of {LOADS} loads", "1 s", sorted(painted_ms)[LOADS // 2] / 1e3, "s")


def _live(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield how long a page of a large store and a compile on request take."""
    path = folder / "large.db"
    with ResultStore.open(path) as store:
        store.put_all(load_sweep(DENSE).trials, [])
    count = multiplied_trials(path, SHAPES)
    yield _row(f"reading a store of {count:,} trials for the first time", "2 s", *_first_read(path))
    begun = time.perf_counter()
    with _serve(path, folder) as (url, pid):
        _open_page(url)
        started = time.perf_counter() - begun, "s", _cpu_seconds(pid)
        yield _row("from `tune ui` on it to a filled page, all libraries loaded on the way", "-", *started)
        _wait_until_idle(pid)
        yield _row("its page, opened while the server stands", "2 s", *_time_work(pid, lambda: _open_page(url)))
        yield _row("what-if of a config that was never compiled", "3 s", *_time_work(pid, lambda: _ask_what_if(url)))
        yield _row("the same config again", "0.2 s", *_time_work(pid, lambda: _ask_what_if(url)))
        other = TILE | {"block_m": 128}
        yield _row("what-if of another one", "3 s", *_time_work(pid, lambda: _ask_what_if(url, other)))


def _first_read(path: Path) -> tuple[float, str, float]:
    """Return the seconds until the sweeps of a store are known and the youngest is a table, and the processor time."""
    begun, cpu = time.perf_counter(), time.process_time()
    store = LiveStore(StoreTarget.of(str(path)))
    store.refresh()
    assert store.table_text(store.overview()["sweeps"][0]["id"])
    return time.perf_counter() - begun, "s", time.process_time() - cpu


def _wait_until_idle(pid: int) -> None:
    """Return once a process has had nothing to do for a second."""
    before = -1.0
    while (now := _cpu_seconds(pid)) != before:
        before = now
        time.sleep(1)


def _time_work(pid: int, work: Callable[[], Any]) -> tuple[float, str, float]:
    """Return the seconds that some work takes, their unit, and the server's processor time of it."""
    begun, cpu = time.perf_counter(), _cpu_seconds(pid)
    work()
    return time.perf_counter() - begun, "s", _cpu_seconds(pid) - cpu


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of all that it has started."""
    ticks, children = 0, [pid]
    while children:
        own = children.pop()
        ticks += sum(map(int, Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()[11:15]))
        for task in Path(f"/proc/{own}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def _serve(db: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """`tune ui` in a process of its own with empty caches: its address and its number."""
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "XDG_CACHE_HOME": str(folder / "cache")}
    with subprocess.Popen(
        (*_tune(), "ui", "--db", str(db), "--json"), stdout=subprocess.PIPE, text=True, env=os.environ | caches
    ) as server:
        assert server.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += server.stdout.readline()
        url = json.loads(text)["url"]
        yield url, server.pid
        server.terminate()


def _open_page(url: str) -> None:
    """Ask for what a page asks for when it opens."""
    for name in ("", "page.js", "vega.js", "data"):
        _read(url, name)
    youngest = _ask_json(url, "overview")["sweeps"][0]["id"]
    assert _ask_json(url, f"table/{youngest}")["table"]["columns"]["kernel"]


def _ask_what_if(url: str, tile: dict[str, int] = TILE) -> None:
    shape = complete_shape(4096, 64, batch=2, heads=32).to_json()
    form = {"device": "h200", "shape": shape, "kernel": "flash_fwd", "parameters": tile}
    job = _ask_json(url, "what-if", form)
    while job["state"] in ("waiting", "compiling"):
        time.sleep(0.01)
        job = _ask_json(url, f"what-if/{job['id']}")
    assert job["answer"]["outcome"] == "ok", job


def _ask_json(url: str, name: str, body: Any = None) -> Any:
    return json.loads(_read(url, name, body))


def _read(url: str, name: str, body: Any = None) -> bytes:
    content = None if body is None else json.dumps(body).encode()
    origin = "/".join(url.split("/")[:3])
    with urlopen(Request(url + name, content, {"origin": origin, "content-type": "application/json"})) as answer:
        return bytes(answer.read())


def _tune() -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "blocktune")


if __name__ == "__main__":
    main()
