"""`--shapes FILE`: which shapes it holds, and what it refuses."""

import time
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.shared.grid import Grid
from blocktune.cli.shared.options import ShapeFlags
from blocktune.cli.shared.shapes_file import flags_of_file, sizes_of_file
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape


def written(folder: Path, text: str) -> Path:
    path = folder / "shapes.toml"
    path.write_text(text, encoding="utf-8")
    return path


def shapes_of_file(path: Path) -> tuple[AttentionShape, ...]:
    return Grid(flags_of_file(path), many=True).shapes()


def test_a_table_is_a_shape_with_the_defaults_of_the_command_line(tmp_path: Path) -> None:
    text = """
    [prefill]
    seq = 8192
    dim = 128
    causal = true
    kv-heads = 4
    features = "window=1023:0 softcap"

    [[more]]
    seq = 1
    seq-k = 4096
    dim = 64
    dim-v = 64
    batch = 8
    heads = 32
    dtype = "fp16"
    [[more]]
    seq = 512
    dim = 64
    direction = "backward"
    """
    assert shapes_of_file(written(tmp_path, text)) == (
        ShapeFlags(seq=8192, dim=128, causal=True, kv_heads=4, features="window=1023:0 softcap").shape(),
        ShapeFlags(seq=1, seq_k=4096, dim=64, dim_v=64, batch=8, heads=32, dtype="fp16").shape(),
        ShapeFlags(seq=512, dim=64, direction="backward").shape(),
    )


def test_a_list_stands_for_each_of_its_values_and_a_shape_stands_once(tmp_path: Path) -> None:
    text = "[a]\nseq = [512, 1024]\ndim = 64\ncausal = [false, true]\n[b]\nseq = 512\ndim = 64\n"
    assert [(shape.seqlen_q, str(shape.causal)) for shape in shapes_of_file(written(tmp_path, text))] == [
        (512, "none"),
        (512, "upper_left"),
        (1024, "none"),
        (1024, "upper_left"),
    ]


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("", ["has no table"]),
        ("seq = 512", ["`seq` outside of any"]),
        ("[a]\nseq = ", ["is not TOML"]),
        ("[a]\nseq = 512", ["[a]", "`dim`"]),
        ("[[a]]\nseq = 512\ndim = 64\n[[a]]\ndim = 64", ["[[a]] number 2", "`seq`"]),
        ("[a]\nseq = 512\ndim = 64\nhead = 3", ["[a]", "`head`", "kv-heads"]),
        ('[a]\nseq = "512"\ndim = 64', ["[a]", "seq = '512'", "an integer"]),
        ("[a]\nseq = 512\ndim = 64\ncausal = 1", ["[a]", "causal = 1", "true or false"]),
        ("[a]\nseq = 512\ndim = 64\ndtype = true", ["[a]", "dtype = True", "a text"]),
        ("[a]\nseq = [512, true]\ndim = 64", ["[a]", "seq = [512, True]"]),
        ("[a]\nseq = []\ndim = 64", ["[a]", "seq = []"]),
        ("[a]\nseq = 512\ndim = 64\nheads = 8\nkv-heads = 3", ["[a]", "num_heads % num_heads_kv"]),
        ('[a]\nseq = 512\ndim = 64\nfeatures = "sink"', ["[a]", "sink"]),
    ],
)
def test_what_is_no_shape_is_refused_with_its_table_and_key(tmp_path: Path, text: str, reasons: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        shapes_of_file(written(tmp_path, text))
    assert all(reason in str(caught.value) for reason in reasons), str(caught.value)


@pytest.mark.parametrize("read", [flags_of_file, sizes_of_file])
def test_lists_that_make_too_many_shapes_are_refused_at_once(read: Any, tmp_path: Path) -> None:
    path = tmp_path / "shapes.toml"
    names = ("seq", "dim", "batch", "heads")
    path.write_text("[many]\n" + "".join(f"{name} = {list(range(8, 1008))}\n" for name in names))
    began = time.process_time()
    with pytest.raises(UsageError, match="At most 10,000 shapes"):
        read(path)
    assert time.process_time() - began < 5


def test_a_key_of_many_parts_is_refused_at_once(tmp_path: Path) -> None:
    """Python's parser takes seconds for 20,000 parts, and hours for as many as a file may have."""
    path = tmp_path / "shapes.toml"
    path.write_text("a" + ".a" * 1_000_000 + " = 1")
    began = time.process_time()
    with pytest.raises(UsageError, match="a line has more than 500 dots"):
        flags_of_file(path)
    assert time.process_time() - began < 5


def test_a_missing_file_is_wrong_use(tune, tmp_path: Path) -> None:
    result = tune("run", "--shapes", tmp_path / "none.toml")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: No such file or directory: {tmp_path / 'none.toml'}.")


@pytest.mark.parametrize("words", [("--seq", 512), ("--grid", "seq=512 dim=64"), ("--from-misses",)], ids=str)
def test_shapes_come_from_one_place(tune, tmp_path: Path, words: tuple[object, ...]) -> None:
    result = tune("run", "--shapes", written(tmp_path, "[a]\nseq = 512\ndim = 64\n"), *words)
    assert result.exit_code == 2
    assert "Leave one out" in result.stderr
