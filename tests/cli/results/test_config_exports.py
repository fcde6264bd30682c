"""`tune export --format` on a real database."""

import ast
import json
from pathlib import Path


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
    assert list(json.loads(file.read_text())) == ["8192"]


def test_each_format_goes_to_stdout(tune, winner) -> None:
    tune.store(winner())
    texts = {format_: tune("export", "-", "--format", format_).stdout for format_ in ("triton", "vllm", "flex", "json")}
    assert "CONFIGS" in texts["triton"]
    assert next(iter(json.loads(texts["vllm"]))).startswith("kernel=flash_fwd,")
    assert json.loads(texts["flex"])["device"] == "NVIDIA H200"
    assert json.loads(texts["json"])["format"] == "blocktune-results"


def test_a_place_that_cannot_be_written_is_said(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    result = tune("export", tmp_path / "no" / "configs.py", "--format", "triton")
    assert result.exit_code == 2
    assert "No such file" in result.stderr
