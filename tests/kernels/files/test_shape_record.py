"""What BLOCKTUNE_RECORD writes down, and that the commands take it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blocktune.cli.shared.shapes_file import flags_of_file
from blocktune.kernels.files import shape_record
from blocktune.kernels.files.shape_record import ShapeRecord
from blocktune.kernels.values.shape import AttentionShape

pytestmark = pytest.mark.triton_free

SHAPES = (
    AttentionShape(batch=2, num_heads=8, seqlen_q=1024, head_dim=64, causal=True),
    AttentionShape(batch=3, num_heads=8, num_heads_kv=2, seqlen_q=1, seqlen_k=777, head_dim=192, head_dim_v=128),
    AttentionShape(batch=1, num_heads=2, seqlen_q=64, head_dim=64, dtype="fp16", direction="backward"),
    AttentionShape(batch=1, num_heads=2, seqlen_q=64, seqlen_k=96, head_dim=64, causal="lower_right", dtype="fp8"),
    AttentionShape(batch=1, num_heads=2, seqlen_q=512, head_dim=64, dtype="fp32", features="window=127:0 softcap"),
)


def test_the_commands_read_every_shape_that_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "shapes.toml"
    record = ShapeRecord(path)
    for shape in SHAPES * 2:
        record.add(shape)
    record.write()
    assert tuple(flags.shape() for flags in flags_of_file(path)) == SHAPES
    assert [file.name for file in tmp_path.iterdir()] == ["shapes.toml"]


def test_a_process_without_a_shape_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.toml"
    path.write_text("of an earlier process")
    ShapeRecord(path).write()
    record = ShapeRecord(path)
    record.add(SHAPES[0])
    record.forget()
    record.write()
    assert path.read_text() == "of an earlier process"


def test_the_number_of_shapes_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shape_record, "MAX_SHAPES", 2)
    record = ShapeRecord(tmp_path / "shapes.toml")
    for shape in SHAPES[:2] * 2:
        record.add(shape)
    record.write()
    assert caplog.messages == []
    record.add(SHAPES[2])
    record.write()
    assert "Only the first 2 shapes" in caplog.text
    assert len(flags_of_file(tmp_path / "shapes.toml")) == 2


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = ShapeRecord(tmp_path / "none" / "shapes.toml")
    record.add(SHAPES[0])
    record.write()
    assert "shapes.toml cannot be written" in caplog.text


PROGRAM = """
import os
from blocktune.kernels.files.shape_record import record
from blocktune.kernels.values.shape import AttentionShape
record(None)
record(AttentionShape(batch=1, num_heads=2, seqlen_q=64, head_dim=64))
os.chdir("/")
"""


@pytest.mark.parametrize("named", ["", "shapes.toml"])
def test_a_process_writes_at_its_end_what_the_variable_names(tmp_path: Path, named: str) -> None:
    environment = os.environ | {"BLOCKTUNE_RECORD": named, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-P", "-c", PROGRAM], cwd=tmp_path, env=environment, check=True)
    assert [file.name for file in tmp_path.iterdir()] == ([named] if named else [])


@pytest.mark.parametrize("named", ["train.py", "folder", "pipe", "/"])
def test_what_is_no_file_of_shapes_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture, named: str) -> None:
    (tmp_path / "train.py").write_text("print('a program')\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = {path.name: path.stat() for path in tmp_path.iterdir()}
    record = ShapeRecord(tmp_path / named)
    record.add(SHAPES[0])
    record.write()
    assert "cannot be written" in caplog.text
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == {
        name: status.st_ino for name, status in before.items()
    }
    assert (tmp_path / "train.py").read_text() == "print('a program')\n"


def test_a_file_of_shapes_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "shapes.toml"
    for shape in SHAPES[:2]:
        record = ShapeRecord(path)
        record.add(shape)
        record.write()
    assert [flags.shape() for flags in flags_of_file(path)] == [SHAPES[1]]


GONE = """
import os, tempfile
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
"""


def test_a_directory_that_is_gone_costs_a_warning(tmp_path: Path) -> None:
    environment = os.environ | {"BLOCKTUNE_RECORD": "shapes.toml", "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", GONE + PROGRAM], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    assert b"the directory of shapes.toml is not known" in ended.stderr
