"""`tune list`, `tune export` and `tune import` on a real database."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.cost.bands import predicted_json


def test_without_a_database_the_list_shows_what_ships_and_creates_none(tune) -> None:
    from blocktune.cli.shared.lookup import shipped_winners

    result = tune("list", "--json")
    bests = json.loads(result.stdout)["bests"]
    assert result.exit_code == 0
    assert len(bests) == len(list(shipped_winners())) > 0
    assert {best["source"] for best in bests} == {"shipped"}
    assert "no database" in result.stderr
    assert not tune.db.exists()
    assert "shipped" in tune("list").stdout


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [("list", 0), ("gc", 0), ("freeze h200.json", 6), ("export h200.json", 6), ("export - --format flex", 6)],
)
def test_a_database_that_is_not_there_yet_is_no_fault(tune, words: str, exit_code: int) -> None:
    result = tune(*words.split())
    assert result.exit_code == exit_code
    assert "no database" in result.stderr
    assert not tune.db.exists()


@pytest.mark.parametrize(
    ("command", "device"),
    [("list", "all"), ("export", "the only one in the database"), ("best", "the GPU here, else h200")],
)
def test_the_help_says_which_device_is_meant(tune, command: str, device: str) -> None:
    help_text = " ".join(tune(command, "--help").stdout.split())
    assert re.search(rf"--device <str> [^-]*\[default: {device}\]", help_text)


def test_two_devices_are_listed_and_not_exported_together(tune, winner) -> None:
    tune.store(winner(), winner(device=device_named("a100")))
    assert len(json.loads(tune("list", "--json").stdout)["bests"]) == 2
    result = tune("export", "-")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "An export is of one device" in result.stderr


def test_what_ships_is_listed_beside_a_database_when_it_is_asked_for(tune, winner) -> None:
    tune.store(winner())
    shipped = json.loads(tune("list", "--shipped", "--device", "h200", "--json").stdout)["bests"]
    assert {(best["source"], best["device"]["name"]) for best in shipped} == {("shipped", "NVIDIA H200")}
    (own,) = json.loads(tune("list", "--json").stdout)["bests"]
    assert own["source"] == "database"
    assert own["shape"]["label"] == "b2 h32 s8192 d64 bf16"


def test_a_device_without_any_winner_has_an_empty_list(tune) -> None:
    result = tune("list", "--device", "t4", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"schema": 1, "bests": [], "kernels": []})


def test_the_list_holds_every_winner_of_a_device(tune, winner) -> None:
    tune.store(winner(energy_mj=540.5, objective="energy"))
    (best,) = json.loads(tune("list", "--device", "h200", "--json").stdout)["bests"]
    assert best["objective"] == "energy"
    assert best["best"] == {
        "kernel": "flash_fwd",
        "config": winner().config.to_json(),
        "time_us": 812.5,
        "energy_mj": 540.5,
        **predicted_json(790.0, "flash_fwd", winner().shape, winner().device),
        "origin": "measured",
    }
    assert best["speedup_over_default"] == {"median": 1.2, "low": 1.19, "high": 1.21}
    assert json.loads(tune("list", "--device", "a100", "--json").stdout)["bests"] == []


def test_the_list_for_people(tune, winner) -> None:
    tune.store(winner())
    text = tune("list").stdout
    for part in ("NVIDIA H200", "b2 h32 s8192 d64 bf16", "flash_fwd 128x64 w4 s3", "measured", "812.5 µs", "1.200x"):
        assert part in text


def test_an_export_can_be_imported_elsewhere(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    file = tmp_path / "h200.json"
    assert json.loads(tune("export", file, "--json").stdout) == {
        "schema": 1,
        "file": str(file),
        "bests": 1,
        "trials": 0,
    }
    listed = tune("list", "--json").stdout
    tune.db = tmp_path / "other.db"
    counts = json.loads(tune("import", file, "--trust", "--json").stdout)
    assert (counts["bests"], counts["bests_kept"]) == (1, 0)
    assert tune("list", "--json").stdout == listed
    assert json.loads(tune("import", file, "--trust", "--json").stdout)["bests_kept"] == 1
    told = "stored 0 winners and 0 trials; left out 1 winner that lost to others and 0 trials not newer\n"
    assert tune("import", file, "--trust").stderr == told


def test_what_was_measured_elsewhere_is_borrowed_until_it_is_trusted(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    file = tmp_path / "h200.json"
    tune("export", file)
    tune.db = tmp_path / "other.db"
    for flags, origin in (((), "borrowed"), (("--trust",), "measured"), ((), "measured")):
        assert tune("import", file, *flags).exit_code == 0
        (best,) = json.loads(tune("list", "--json").stdout)["bests"]
        assert (best["best"]["origin"], best["best"]["time_us"]) == (origin, 812.5)


def test_an_export_to_stdout_is_the_document_itself(tune, winner) -> None:
    tune.store(winner())
    document = json.loads(tune("export", "-").stdout)
    assert (document["format"], len(document["bests"])) == ("blocktune-results", 1)


def test_an_export_of_a_missing_database_creates_none(tune, tmp_path: Path) -> None:
    result = tune("export", tmp_path / "out.json")
    assert result.exit_code == 6
    assert "tune run" in result.stderr
    assert not tune.db.exists()
    assert not (tmp_path / "out.json").exists()


def test_an_export_that_cannot_be_written_says_so(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    result = tune("export", tmp_path / "no" / "folder.json")
    assert result.exit_code == 2
    assert "No such file" in result.stderr


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "no json", '{"format": "blocktune-results", "schema": 99}', "[" * 100_000], ids=len
)
def test_an_import_of_anything_else_is_refused_and_nothing_is_lost(tune, winner, tmp_path: Path, text: str) -> None:
    tune.store(winner())
    before = tune("list", "--json").stdout
    file = tmp_path / "bad.json"
    file.write_text(text)
    result = tune("import", file)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert tune("list", "--json").stdout == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"colour": "red"}, "colour"),
        ({"time_us": -1.0}, "time_us"),
        ({"time_us": 1e300}, "time_us"),
        ({"config": {"kernel": "flash_fwd", "block_m": 3, "block_n": 64, "num_warps": 4, "num_stages": 1}}, "block_m"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_unknown_fields_and_absurd_values_are_named(tune, winner, tmp_path: Path, change: dict, word: str) -> None:
    tune.store(winner())
    document = json.loads(tune("export", "-").stdout)
    document["bests"][0] |= change
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(document))
    result = tune("import", file)
    assert result.exit_code == 2
    assert word in result.stderr


@pytest.mark.parametrize(
    "words", [("list",), ("export", "-"), ("best", "--seq", "64", "--dim", "64")], ids=lambda w: w[0]
)
def test_a_file_that_is_no_database_is_exit_code_5_and_untouched(tune, words: tuple[str, ...]) -> None:
    tune.db.write_bytes(b"no database" * 1000)
    result = tune(*words)
    assert result.exit_code == 5
    assert "--db" in result.stderr
    assert tune.db.read_bytes() == b"no database" * 1000


def test_trials_go_to_optunas_storage_and_come_back(tune, tmp_path: Path) -> None:
    from blocktune.db.records.records import Outcome
    from blocktune.db.store import ResultStore
    from tests.support.models import landscape

    config = landscape.SPACE.feasible[0]
    made = landscape.SUBJECT.trial(config, Outcome.INFEASIBLE, error="not one block fits")
    trial = replace(made, kernel_hash="0" * 16)
    with ResultStore.open(tune.db) as store:
        store.record(trial)
    place = tmp_path / "studies.db"
    written = json.loads(tune("export", place, "--format", "optuna", "--json").stdout)
    assert list(written["studies"].values()) == [1]
    assert tune("export", "-", "--format", "optuna").exit_code == 2
    tune.db = tmp_path / "other.db"
    counts = json.loads(tune("import", written["url"], "--json").stdout)
    assert (counts["trials"], counts["bests"]) == (1, 0)
    with ResultStore.open(tune.db) as store:
        (back,) = store.trials()
    assert (back.config, back.error, back.imported) == (config, "not one block fits", True)
    nothing = tune("import", f"sqlite:///{tmp_path / 'none.db'}")
    assert nothing.exit_code == 2
    assert "Traceback" not in nothing.output


def test_without_trials_there_is_no_study(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    result = tune("export", tmp_path / "studies.db", "--format", "optuna")
    assert result.exit_code == 6
    assert "tune run" in result.stderr


def test_other_formats_are_written_at_once_and_through_no_link(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    victim, out = tmp_path / "victim", tmp_path / "configs.py"
    victim.write_text("mine")
    out.symlink_to(victim)
    assert tune("export", out, "--format", "triton").exit_code == 0
    assert victim.read_text() == "mine"
    assert "CONFIGS" in out.read_text()
