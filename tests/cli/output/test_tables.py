"""Tables and messages on terminals of any width, and where no terminal limits them."""

import io
import re
from collections.abc import Sequence

import pytest

from blocktune.cli.output.render import note, print_table, say
from blocktune.cli.output.tables import Row, fitted_table, wrapped_lines

COLUMNS = ("", "config", "time", "against the default")
CONFIG = "flash_fwd_hopper 192x128 w4 s3 early_p=1 keep_p=0 split_release=0"
ROWS = (
    ("winner", CONFIG, "2,005.7 µs", "1.029x (1.014 to 1.039)"),
    ("default", "flash_fwd 64x64 w4 s2", "-", "1.000x"),
)


def table_lines(columns: Row, rows: Sequence[Row], width: int | None, optional: Row = ()) -> list[str]:
    lines, _ = fitted_table(columns, rows, width, optional)
    return lines


def test_a_table_is_as_wide_as_its_cells_where_nothing_limits_it() -> None:
    head, rule, winner, default = table_lines(COLUMNS, ROWS, None)
    assert winner.split() == ["winner", *CONFIG.split(), "2,005.7", "µs", "1.029x", "(1.014", "to", "1.039)"]
    assert len(rule) == len(winner) == len("default") + len(CONFIG) + len("2,005.7 µs") + len(ROWS[0][3]) + 3 * 3
    assert (head.split()[0], default.split()[0]) == ("config", "default")


@pytest.mark.parametrize("width", range(20, 200, 7))
def test_no_line_is_wider_than_the_terminal_and_no_word_is_cut(width: int) -> None:
    lines = table_lines(COLUMNS, ROWS, width)
    words = " ".join(lines).split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    for row in ROWS:
        assert {word for cell in row for word in cell.split() if cell != "-"} <= set(words)


def test_a_little_too_wide_wraps_the_widest_column_and_far_too_wide_becomes_cards() -> None:
    natural = len(table_lines(COLUMNS, ROWS, None)[1])
    wrapped = table_lines(COLUMNS, ROWS, natural - 1)
    assert wrapped[0].split()[0] == "config"
    assert len(wrapped) == 5
    assert table_lines(COLUMNS, ROWS, 60)[:3] == [
        "winner",
        "  config               flash_fwd_hopper 192x128 w4 s3",
        "                       early_p=1 keep_p=0 split_release=0",
    ]


def test_a_card_leaves_out_what_says_nothing() -> None:
    *_, blank, heading, config, ratio = table_lines(COLUMNS, ROWS, 60)
    assert (blank, heading) == ("", "default")
    assert config.split() == ["config", "flash_fwd", "64x64", "w4", "s2"]
    assert ratio.endswith("1.000x")


def test_cards_name_every_cell_where_the_first_column_has_a_name() -> None:
    lines = table_lines(("device", "shape"), [("NVIDIA H200", "b2 h32 s8192 d64 bf16")], 29)
    assert lines == ["device  NVIDIA H200", "shape   b2 h32 s8192 d64 bf16"]


def test_columns_that_may_go_are_left_out_before_a_table_becomes_cards() -> None:
    columns, rows = ("name", "device", "cc", "SMs"), [("t4", "Tesla-T4-with-16-GB", "7.5", "40")]
    assert table_lines(columns, rows, 25, ("device", "SMs"))[0].split() == ["name", "cc", "SMs"]
    assert table_lines(columns, rows, 15, ("device", "SMs"))[0].split() == ["name", "cc"]
    assert table_lines(columns, rows, 12, ("device",))[0] == "name    t4"


def test_a_line_is_cut_between_words_and_keeps_its_indent() -> None:
    text = "  compiling for NVIDIA H200 (compute capability 9.0)"
    assert wrapped_lines(text, 30, indent=2) == ["  compiling for NVIDIA H200", "  (compute capability 9.0)"]
    assert wrapped_lines("/a/path/that/is/longer/than/any/line", 10, indent=0) == [
        "/a/path/that/is/longer/than/any/line"
    ]


class Terminal(io.StringIO):
    """A stream that people look at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("show", "stream"), [(note, "stderr"), (say, "stdout")])
def test_a_message_is_wrapped_at_words_on_a_terminal_alone(
    show: object, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(show)
    message = "no GPU in this machine: compiling for NVIDIA H200 (compute capability 9.0) and predicting"
    for terminal, lines in ((Terminal(), 3), (io.StringIO(), 1)):
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setattr(f"sys.{stream}", terminal)
        show(message)
        shown = terminal.getvalue().splitlines()
        assert len(shown) == lines
        assert " ".join(shown) == message


def test_a_table_on_a_terminal_keeps_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.stdout", terminal)
    print_table(COLUMNS, ROWS, title="b2 h32 s8192 d64 bf16")
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert text.splitlines()[0] == "b2 h32 s8192 d64 bf16"
    assert max(map(len, text.splitlines())) <= 72


def test_a_table_says_which_columns_it_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    columns, rows = ("name", "device", "cc", "SMs"), [("t4", "Tesla-T4-with-16-GB", "7.5", "40")]
    for width, named in (("60", ""), ("25", "device"), ("15", "device, SMs")):
        monkeypatch.setenv("COLUMNS", width)
        print_table(columns, rows, optional=("device", "SMs"))
        said = f"left out, since the terminal is narrow: {named}; --json has everything\n" if named else ""
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("word", "cells"), [("é", 1), ("e\u0301", 1), ("µs", 2), ("界", 2), ("ｗ", 2), ("a\u200bb", 2)]
)
def test_columns_line_up_by_what_a_terminal_shows(word: str, cells: int) -> None:
    _, _, line = table_lines(("", "x"), [(word, "end")], None)
    _, _, plain = table_lines(("", "x"), [("a" * cells, "end")], None)
    assert line.removeprefix(word) == plain.removeprefix("a" * cells)
