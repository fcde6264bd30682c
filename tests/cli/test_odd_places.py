"""Whatever the environment holds and a path leads to, a command ends in words, with a code of the list."""

import time
from pathlib import Path

import pytest

from blocktune.cli.main import app
from blocktune.kernels.files.variables import VARIABLES
from tests.support.command_line import CliRunner, Result
from tests.support.stores.odd_values import KINDS, odd_file, odd_value

CODES = {0, 2, 3, 4, 5, 6, 7}
MAX_SECONDS = 5.0
SHAPE = "--seq 8192 --dim 64 --device h200"
READERS = (
    *("diff FILE FILE", "merge FILE", "import FILE", "report FILE --out OUT.html", "run --shapes FILE"),
    *(f"profile {SHAPE} --from FILE", "lab replay FILE", "lab rematch FILE FILE", "freeze --verify FILE FILE"),
    *(
        "lab calibrate FILE --out OUT.json",
        "lab sweeps show FILE",
        "list --db FILE",
        "doctor --db FILE",
        "gc --db FILE",
    ),
    *("doctor --recover --db FILE", "doctor --restore --db FILE", "doctor --drill --db FILE", "import JSON --db FILE"),
)
"""Commands with a file that they read."""
OTHERS = (
    *("list --json", f"best {SHAPE}", "kernels", "export OUT.json --device h200", "freeze OUT.json --device h200"),
    *(
        "gc",
        "buckets",
        "verify",
        "doctor",
        "devices",
        "lab sweeps OUT",
        "import JSON",
        "run --from-misses",
        "diff JSON JSON",
    ),
    *("doctor --recover", "doctor --restore"),
)
"""Commands that find their database by the environment."""
ENDLESS = ("pipe", "socket", "endless", "kernel log", "sparse", "directory")
SUFFIXES = ("", ".json", ".db", ".sweep.json.gz", ".counters.csv", ".toml", ".ladder.json")


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    Path("some.json").write_text("{}")


def run(command: str, path: Path | None = None) -> Result:
    """Run a command, whose messages have to end in words and in time."""
    words = [word.replace("OUT", "out").replace("JSON", "some.json") for word in command.split()]
    began = time.process_time()
    done = CliRunner().invoke(app, [str(path) if word == "FILE" else word for word in words])
    assert time.process_time() - began < MAX_SECONDS
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.exit_code in CODES
    assert "\x1b" not in done.stderr
    return done


@pytest.mark.few(12)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("command", READERS)
def test_a_file_without_an_end_is_refused_in_one_sentence(command: str, kind: str, suffix: str, tmp_path: Path) -> None:
    done = run(command, odd_file(tmp_path, kind, suffix))
    assert done.output.strip()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("command", ["report FILE --out OUT.html", "run --shapes FILE", f"profile {SHAPE} --from FILE"])
def test_what_ended_in_a_lack_of_memory_says_what_it_is(command: str, kind: str, tmp_path: Path) -> None:
    if kind == "directory" and command.startswith("report"):
        return  # of files that a report shows
    done = run(command, odd_file(tmp_path, kind, ".json"))
    assert done.exit_code == 2
    said = {"sparse": "it is larger than", "endless": "it is a device", "kernel log": ""}.get(kind, f"it is a {kind}")
    assert said in " ".join(done.stderr.split())


@pytest.mark.few(16)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", OTHERS)
def test_a_command_survives_odd_variables(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = odd_value(tmp_path, kind)
    for name in VARIABLES:
        monkeypatch.setenv(name, value)
    run(command)


def test_the_doctor_names_odd_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_CANARY", "ture")
    monkeypatch.setenv("BLOCKTUNE_CANNARY", "1")
    said = " ".join(run("doctor").output.split())
    assert "BLOCKTUNE_CANARY must be 1 or 0" in said
    assert "blocktune reads no variable of this name" in said


def test_the_doctor_shows_incidents(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "blocktune"
    folder.mkdir(parents=True)
    line = '{"error": "TypeError: a number (canary.py:60)", "shape": "b1", "time": "2026-11-29T10:00:00+00:00"}\n'
    (folder / "incidents.jsonl").write_text(line * 3 + "half a li")
    said = " ".join(run("doctor").output.split())
    assert "3, the last at 2026-11-29T10:00:00+00:00" in said
    assert "TypeError: a number (canary.py:60), for b1" in said
