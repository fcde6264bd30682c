"""`tune lab sweeps` on a real database."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

from blocktune.db.exchange.document import document_from
from blocktune.db.records.records import Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.registry import kernels_for
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.lab.sweep_file import load_sweep


def record_all(tune, winner, *, but: int = 0) -> int:
    """Trials of every feasible config of the winner's shape, except some; returns how many there are."""
    best = winner()
    kernels = kernels_for(best.shape, best.device.limits)
    hashes = {kernel.name: kernel.source_hash for kernel in kernels}
    feasible = SearchSpace.build(best.shape, best.device.limits, kernels).feasible
    with ResultStore.open(tune.db) as store:
        trials = [
            Trial(
                device=best.device,
                environment=best.environment,
                shape=best.shape,
                config=config,
                kernel_hash=hashes[config.kernel],
                outcome=Outcome.OK,
                time_us=1000.0 + index,
                relative_to_anchor=1 + 0.001 * index,
                samples_us=(1000.0 + index,) * 3,
                created_at=datetime(2026, 11, 20, tzinfo=UTC),
            )
            for index, config in enumerate(feasible[but:])
        ]
        store.import_json(document_from(best.device, (), trials))
    return len(feasible)


def test_a_whole_sweep_is_written_and_a_part_only_on_request(tune, winner, tmp_path: Path) -> None:
    count = record_all(tune, winner, but=1)
    folder = tmp_path / "results" / "sweeps"
    left_out = tune("lab", "sweeps", folder, "--json")
    assert left_out.exit_code == 0, left_out.output
    assert json.loads(left_out.stdout)["sweeps"] == []
    assert "whose 1 other configs" in left_out.stderr
    (part,) = json.loads(tune("lab", "sweeps", folder, "--partial", "--json").stdout)["sweeps"]
    assert (part["configs"], part["missing"]) == (count - 1, 1)
    record_all(tune, winner)
    (whole,) = json.loads(tune("lab", "sweeps", folder, "--json").stdout)["sweeps"]
    assert (whole["configs"], whole["timed"], whole["missing"], whole["best_us"]) == (count, count, 0, 1000.0)
    assert len(load_sweep(Path(whole["file"])).trials) == count
    assert "h200-b2-h32-s8192-d64-bf16.sweep.json.gz" in tune("lab", "sweeps", folder).stdout


def test_wrong_places_are_said_before_anything_is_written(tune, winner, tmp_path: Path) -> None:
    result = tune("lab", "sweeps", tmp_path / "out")
    assert result.exit_code == 6
    assert not (tmp_path / "out").exists()
    tune.store(winner())
    (tmp_path / "file").write_text("")
    result = tune("lab", "sweeps", tmp_path / "file")
    assert result.exit_code == 2
    assert "cannot be made" in result.stderr


SHIPPED = Path(__file__).parents[3] / "results" / "sweeps"
WIDE = SHIPPED / "h200-b4-h8-s4096-d256-bf16-causal.sweep.json.gz"


def test_a_sweep_is_shown_as_heat_maps(tune) -> None:
    result = tune("lab", "sweeps", "show", WIDE)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    sweep = load_sweep(WIDE)
    best = min(sweep.timed.values(), key=lambda trial: sweep.scores[trial.config])
    assert best.config.label in " ".join(line.strip() for line in lines)
    assert "flash_fwd_hopper" in lines
    shown = {int(number) for number in re.findall(r"\b\d{2,3}(?=[* ])", "\n".join(lines[5:]))}
    fastest = round(sweep.shape.flops / (best.time_us or 1) / 1e6)
    assert fastest in shown
    assert "." in {line[-2:-1] for line in lines} | {cell for line in lines for cell in line.split()}
    assert any("*" in line for line in lines[6:])


def test_the_tiles_of_a_sweep_as_json_begin_with_the_fastest(tune) -> None:
    found = json.loads(tune("lab", "sweeps", "show", WIDE, "--json").stdout)
    sweep = load_sweep(WIDE)
    best = min(sweep.timed.values(), key=lambda trial: sweep.scores[trial.config])
    assert (found["configs"], found["timed"]) == (len(sweep.trials), len(sweep.timed))
    assert found["tiles"][0] == {
        "config": best.config.to_json(),
        "time_us": best.time_us,
        "tflops": sweep.shape.flops / (best.time_us or 1) / 1e6,
    }


def test_a_config_without_a_time_is_marked(tune) -> None:
    result = tune("lab", "sweeps", "show", WIDE)
    failed = [trial.config for trial in load_sweep(WIDE).trials if trial.outcome is not Outcome.OK]
    assert failed
    assert " x " in result.stdout


def test_what_is_no_sweep_is_refused(tune, tmp_path: Path) -> None:
    (tmp_path / "a.sweep.json.gz").write_text("no")
    result = tune("lab", "sweeps", "show", tmp_path / "a.sweep.json.gz")
    assert result.exit_code == 2
    assert "is not JSON in gzip" in result.stderr


def test_the_name_of_the_command_may_be_left_out(tune, winner, tmp_path: Path) -> None:
    record_all(tune, winner)
    by_name, without = (json.loads(tune("lab", "sweeps", *words).stdout) for words in (
        ("write", tmp_path / "a", "--json"), ("--json", tmp_path / "b")))  # fmt: skip
    assert [row["configs"] for row in by_name["sweeps"]] == [row["configs"] for row in without["sweeps"]] != []
