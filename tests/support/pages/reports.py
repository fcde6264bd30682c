"""Reports of the shipped results, written by the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blocktune.cli.main import app
from tests.support.command_line import CliRunner

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
SHIPPED = ROOT / "blocktune" / "results"
SWEEPS = RESULTS / "sweeps"
DENSE = SWEEPS / "h200-b2-h32-s8192-d64-bf16.sweep.json.gz"
WIDE = SWEEPS / "h200-b4-h8-s4096-d256-bf16-causal.sweep.json.gz"
"""With tiles that cannot exist, and configs that do not compile."""
SYNTHETIC_COUNTERS = ROOT / "tests" / "data" / "synthetic-flash_fwd.counters.csv"
"""Made-up counters of a made-up GPU, in the form that `tune profile --out` writes."""
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m"
DOCUMENTS = {
    path.name: path
    for path in (
        RESULTS / "h200.bench.json",
        RESULTS / "h200.replay.json",
        RESULTS / "h200.noise.json",
        SHIPPED / "h200.ladder.json",
        SHIPPED / "h200.json",
    )
}
"""One of every kind, by their names."""


def write_report(out: Path, *places: Path) -> Path:
    """Run `tune report` on these places."""
    pytest.importorskip("altair", reason="charts need altair")
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python")
    words = ["report", *map(str, places), "--out", str(out)]
    result = CliRunner().invoke(app, words, env={"BLOCKTUNE_DB": "", "BLOCKTUNE_MISSES": "off"})
    assert result.exit_code == 0, result.output
    return out


def hostile_bench(folder: Path) -> Path:
    """A bench whose device and contenders have names that would run."""
    document = json.loads((RESULTS / "h200.bench.json").read_text())
    document["device"]["name"] = HOSTILE
    for row in document["rows"]:
        row["contenders"][3]["name"] = HOSTILE
    path = folder / "hostile.bench.json"
    path.write_text(json.dumps(document))
    return path


def python_of_few_addresses(*words: object) -> subprocess.CompletedProcess[str]:
    """Run Python with 6 GiB of addresses, as a cluster's batch system may allow."""
    command = ["/bin/sh", "-c", 'ulimit -v 6291456; exec "$@"', "sh", sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
