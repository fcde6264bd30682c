"""What pages show of the commands is what the commands say and print."""

import re
from pathlib import Path

import pytest

from blocktune.cli.output.render import INTERRUPTED
from blocktune.kernels.hardware.device import present_devices
from blocktune.kernels.values import errors
from tools.pages.command_output import BLOCK, output, with_output
from tools.pages.command_reference import leaf_commands, reference, with_commands
from tools.pages.pages import pages

ROOT = Path(__file__).parents[3]
COMMANDS_PAGE = ROOT / "docs" / "reference" / "commands.md"
SHOWING = [path for path in pages(ROOT) if BLOCK.search(path.read_text())]


def without_provenance(page: str) -> list[str]:
    """The lines of a page, but for those that depend on the Triton and ptxas of this environment."""
    return [line for line in page.splitlines() if not line.startswith("time ")]


def test_the_reference_of_the_commands_is_up_to_date() -> None:
    page = COMMANDS_PAGE.read_text()
    assert with_commands(page) == page, "run `make results`"


def test_the_reference_has_every_command_flag_and_default() -> None:
    text = reference()
    of_shapes = ["--seq", *re.findall(r"`(--[\w-]+)`", text.split("| `--seq`")[1].split("| `--device`")[0])]
    assert len(of_shapes) == 12
    assert {"run", "lab replay", "lab sweeps show"} <= leaf_commands().keys()
    for name, command in leaf_commands().items():
        section = text.split(f"### tune {name}\n")[1].split("\n### ")[0]
        flags = {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
        if "`--seq` to `--features`" in section:
            assert flags >= set(of_shapes)
            flags -= set(of_shapes)
        assert [flag for flag in flags if f"`{flag}" not in section] == []
    assert "| `--seed` | Random seed for the sampler and the test data. | 0 |" in text
    assert "| `--heads` | Query heads. | 2048 / dim |" in text
    assert "\b" not in text


def test_the_exit_codes_are_those_of_the_errors() -> None:
    lines = COMMANDS_PAGE.read_text().split("| exit code | meaning |")[1].split("\n\n")[0].splitlines()[2:]
    root = errors.BlocktuneError
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, root)]
    raised = {each.exit_code for each in classes} - {root.exit_code}
    assert {int(line.split("|")[1]) for line in lines} == {0, INTERRUPTED} | raised


def test_pages_show_output() -> None:
    assert ROOT / "docs" / "guide" / "getting_started.md" in SHOWING


@pytest.mark.parametrize("page", SHOWING, ids=lambda path: path.name)
def test_the_pages_show_what_the_commands_print(page: Path) -> None:
    text = page.read_text()
    assert without_provenance(with_output(text)) == without_provenance(text), "run `make results`"


@pytest.mark.slow
@pytest.mark.skipif(bool(present_devices()), reason="the page shows a machine without a GPU, which predicts")
def test_the_first_search_shows_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "guide" / "getting_started.md").read_text()
    shown = page.split("$ tune best --seq 8192 --dim 64 --device h200\n")[1].split("```")[0]
    printed = output("run --seq 8192 --dim 64 --device h200 --trials 2")
    assert without_provenance(printed) == without_provenance(shown)


def test_a_block_is_filled_with_the_command_and_its_output() -> None:
    page = with_output("a\n<!-- output tune devices -->\nold\n<!-- /output -->\nb\n")
    assert page.startswith("a\n<!-- output tune devices -->\n```console\n$ tune devices\n")
    assert page.endswith("\n```\n<!-- /output -->\nb\n")
    assert "old" not in page


def test_a_command_that_fails_has_no_place_in_a_page() -> None:
    with pytest.raises(errors.UsageError, match=r"`tune occupancy --cc 1\.0` of a page ended with 2"):
        output("occupancy --cc 1.0")
