"""Help of commands with many options."""

import pytest

from blocktune.cli.shared.short_help import ALL, MANY, USUAL
from tools.pages.command_reference import leaf_commands


def options_in(text: str) -> list[str]:
    """The options that a help lists."""
    lines = text.split("Options:")[1].splitlines()
    return [line for line in lines if line.lstrip().startswith("-") and line.startswith("  -")]


def test_the_help_of_a_search_has_about_ten_options_and_names_the_way_to_the_others(tune) -> None:
    short, full = tune("run", "--help").output, tune("run", ALL).output
    assert 8 <= len(options_in(short)) <= 12
    assert "--sampler" not in "".join(options_in(short))
    assert "--sampler" in "".join(options_in(full))
    hidden = len(options_in(full)) - len(options_in(short))
    assert f"{hidden} more options: " in short
    assert "more options" not in full


@pytest.mark.parametrize("name", ["best", "devices"])
def test_a_help_of_few_options_is_whole(name: str, tune) -> None:
    assert options_in(tune(name, "--help").output) == options_in(tune(name, ALL).output)


def test_usual_options_exist() -> None:
    commands = leaf_commands().values()
    known = {name for command in commands for parameter in command.params for name in parameter.opts}
    assert USUAL - known == {"--help"}
    assert sum(len(command.params) > MANY for command in commands) >= 2
