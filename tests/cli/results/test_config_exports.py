"""`tune export --format` on a real database."""

import ast
import json
from pathlib import Path

import pytest

from blocktune.db.records.records import Best
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import Origin
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tests.cli.results.test_upkeep import trial_of
from tests.support.stores.frozen_files import KERNEL, autotuned_winner


def test_triton_configs_go_to_a_file(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    file = tmp_path / "configs.py"
    result = tune("export", file, "--format", "triton", "--json")
    assert json.loads(result.stdout) == {"schema": 1, "files": [str(file)]}
    assert "triton.Config" in ast.unparse(ast.parse(file.read_text()))


def test_vllm_files_go_to_a_folder(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    assert tune("export", tmp_path / "configs", "--format", "vllm").exit_code == 0
    (file,) = (tmp_path / "configs").iterdir()
    assert file.name.endswith("device_name=NVIDIA_H200.json")
    assert list(json.loads(file.read_text())) == ["triton_version", "8192"]


def test_many_files_are_counted_in_one_line(tune, winner, tmp_path: Path) -> None:
    tune.store(winner(), winner(shape=complete_shape(8192, 64, causal=True)))
    result = tune("export", tmp_path / "configs", "--format", "vllm")
    assert result.stderr == f"wrote 2 files into {tmp_path / 'configs'}\n"


def test_nothing_to_write_is_6_with_the_reason(tune, winner, tmp_path: Path) -> None:
    tune.store(winner(origin=Origin.PREDICTED, time_us=None, default_time_us=None, speedup_over_default=None))
    result = tune("export", tmp_path / "flex.json", "--format", "flex")
    assert result.exit_code == 6
    assert "`--format flex` takes measured forwards without features of flash_fwd and flash_fwd_tma" in result.stderr


def test_each_format_goes_to_stdout(tune, winner) -> None:
    tune.store(winner())
    texts = {format_: tune("export", "-", "--format", format_).stdout for format_ in ("triton", "vllm", "flex", "json")}
    assert "CONFIGS" in texts["triton"]
    assert next(iter(json.loads(texts["vllm"]))).startswith("kernel=flash_fwd,")
    assert json.loads(texts["flex"])["device"] == "NVIDIA H200"
    assert json.loads(texts["json"])["format"] == "blocktune-results"


@pytest.mark.parametrize(("format_", "what"), [("vllm", "1 winner"), ("csv", "1 trial")])
def test_a_format_of_attention_says_what_it_leaves_out(tune, winner, tmp_path: Path, format_: str, what: str) -> None:
    put_autotuned(tune, winner())
    said = f"left out {what} of autotuned kernels, which `--format {format_}` cannot hold\n"
    assert said in tune("export", tmp_path / "out", "--format", format_).stderr


def test_triton_and_optuna_hold_every_kernel(tune, winner, tmp_path: Path) -> None:
    put_autotuned(tune, winner())
    result = tune("export", tmp_path / "configs.py", "--format", "triton")
    assert result.stderr == f"wrote {tmp_path / 'configs.py'}\n"
    assert KERNEL in (tmp_path / "configs.py").read_text()
    studies = f"sqlite:///{tmp_path / 'studies.db'}"
    assert len(json.loads(tune("export", studies, "--format", "optuna", "--json").stdout)["studies"]) == 2
    tune.db = tmp_path / "other.db"
    assert json.loads(tune("import", studies, "--json").stdout)["trials"] == 2


def put_autotuned(tune, best: Best) -> None:
    """Store a winner of attention and one of an autotuned kernel, with a trial of each."""
    own = autotuned_winner(64)
    with ResultStore.open(tune.db) as store:
        store.put_all([trial_of(best), trial_of(own)], [best, own])


def test_a_place_that_cannot_be_written_is_said(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    result = tune("export", tmp_path / "no" / "configs.py", "--format", "triton")
    assert result.exit_code == 2
    assert "No such file" in result.stderr
