"""The figures that lead the README, the support matrix, and the shapes that are lost."""

import json
import shutil
from pathlib import Path

from tools import SHIPPED
from tools.pages.front_page import attention_speed, tuner_speed, verdict
from tools.pages.support_matrix import support_matrix, with_support
from tools.pages.targets.tables import block

RESULTS = Path(__file__).parents[3] / "results"


def test_speed_counts_the_shapes_that_are_slower(tmp_path: Path) -> None:
    bench = json.loads((RESULTS / "h200.bench.json").read_text())
    for row in bench["rows"][:3]:
        for entry in row["contenders"]:
            if entry["name"] == "cudnn":
                entry["timing"]["median_us"] = 0.1
    (tmp_path / "h200.bench.json").write_text(json.dumps(bench))
    lines = attention_speed(tmp_path).splitlines()
    assert lines[0] == "| speed over the fastest rival | H200 | H100 |"
    assert "slower in 3 of 24 shapes | not measured |" in lines[2]
    assert lines[3] == "| forward, sustained | not measured | not measured |"


def test_the_tuner_s_sentence_is_of_the_record(tmp_path: Path) -> None:
    record = json.loads((RESULTS / "h200.libraries.json").read_text())
    for row in record["starts"]:
        if (row["model"], row["start"], row["tuner"]) == ("fla", "cold", "blocktune"):
            row["step_seconds"] = 77.7
    (tmp_path / "h200.libraries.json").write_text(json.dumps(record))
    assert "s by Triton's tuner, 77.7 s by this one" in tuner_speed(tmp_path)


def test_the_verdict_is_of_the_record(tmp_path: Path) -> None:
    bench = json.loads((RESULTS / "h200.bench.json").read_text())
    row = next(row for row in bench["rows"] if row["label"] == "b2 h32 s8192 d64 bf16")
    entry = next(entry for entry in row["contenders"] if entry["name"] == "cudnn")
    entry["timing"]["median_us"] = 987.6
    (tmp_path / "h200.bench.json").write_text(json.dumps(bench))
    line = verdict(tmp_path).split("\n")[3]
    assert line.startswith("b2 h32 s8192 d64 bf16")
    assert "   cuDNN " in line
    assert "   987.6 µs   " in line


def test_the_matrix_says_what_was_measured_and_what_goes_to_pytorch(tmp_path: Path) -> None:
    for name in ("h200.json", "h100.json"):
        shutil.copy(SHIPPED / name, tmp_path)
    rows = {line.split(" | ")[0]: line for line in support_matrix(tmp_path).splitlines()}
    assert rows["| bf16"].startswith("| bf16 | measured, 16 to 256 | compiled, ")  # by the winners that ship
    assert rows["| fp8"] == "| fp8 | compiled, 48 to 256 | PyTorch | PyTorch |"  # no bench is in the folder
    assert "| fp8 | measured, " in support_matrix(RESULTS)
    page = with_support("a\n<!-- support -->\nold\n<!-- /support -->\nb", RESULTS)
    assert "old" not in page
    assert page.endswith("\n<!-- /support -->\nb")


def test_the_matrix_of_directions_has_the_rows_of_the_short_one_and_more() -> None:
    table = with_support("<!-- support directions -->\nold\n<!-- /support -->", RESULTS)
    lines = [line.removeprefix("| ").split(" | ") for line in table.splitlines()[3:-1]]
    rows = {name: line[1:] for line in lines for name in line[0].split(", ")}
    short = {line.split(" | ")[0].removeprefix("| ") for line in support_matrix(RESULTS).splitlines()[2:]}
    assert short - rows.keys() == {"gradients, bf16"}
    assert rows["bf16"][:2] == ["measured, 16 to 256"] * 2
    assert rows["cache"][1] == "none"
    assert table.endswith("\n<!-- /support -->")


def test_every_lost_shape_is_slower_than_its_rival() -> None:
    ratios = [float(line.split(" | ")[4]) for line in block("losses", RESULTS).splitlines()[2:]]
    assert ratios
    assert max(ratios) < 1
