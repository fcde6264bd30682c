"""No value of a variable of the environment raises: it is taken, or it costs one warning and the default holds."""

import logging
import os
from typing import Any

import pytest

from blocktune import autoload
from blocktune.kernels.files import variables
from blocktune.kernels.files.variables import VARIABLES, Count, OptionalFile, Switch, unknown_names

pytestmark = pytest.mark.triton_free

SWITCHES = [variable for variable in VARIABLES.values() if isinstance(variable, Switch)]
COUNTS = [variable for variable in (*VARIABLES.values(), variables.LOCAL_RANKS) if isinstance(variable, Count)]
FILES = [variable for variable in VARIABLES.values() if isinstance(variable, OptionalFile)]


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_warned", set())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("variable", SWITCHES, ids=lambda variable: variable.name)
def test_a_switch_is_on_off_or_its_default(
    variable: Switch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = {}
    for said in ("1", " on ", "YES\t", "True\n", "0", "0 ", " OFF", "no", "false", "", "  "):
        monkeypatch.setenv(variable.name, said)
        found[said] = variable.is_on()
    monkeypatch.delenv(variable.name)
    assert list(found.values()) == [True] * 4 + [False] * 5 + [variable.is_on()] * 2
    assert variable.is_on() is (variable.default == "1")
    assert warnings_in(caplog) == []


def test_defaults_are_the_safe_side() -> None:
    assert {variable.name for variable in SWITCHES if variable.default != "0"} == {"BLOCKTUNE_CANARY"}


@pytest.mark.parametrize("said", ["ture", "2", "1 0", "\x1b[0m", "x" * 5000, "\udcff"])
@pytest.mark.parametrize("variable", [*SWITCHES, *COUNTS], ids=lambda variable: variable.name)
def test_a_value_that_means_nothing_costs_one_warning(
    variable: Switch | Count, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    unset = value_of(variable)
    said = "two" if said == "2" and isinstance(variable, Count) else said
    monkeypatch.setenv(variable.name, said)
    assert [value_of(variable) for _ in range(3)] == [unset] * 3
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"{variable.name} must be {variable.values}, but got '")
    assert variable.default in warning
    assert warning.isprintable()
    assert len(warning) < 400


def value_of(variable: Switch | Count) -> Any:
    return variable.is_on() if isinstance(variable, Switch) else variable.number()


@pytest.mark.parametrize("said", ["0", "-1", "1.5", "1e3", "9" * 5000, "²"])
@pytest.mark.parametrize("variable", COUNTS, ids=lambda variable: variable.name)
def test_a_count_is_a_number_from_1_on(variable: Count, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable.name, said)
    assert variable.number() is None
    monkeypatch.setenv(variable.name, " 12 ")
    assert variable.number() == 12


@pytest.mark.parametrize("variable", FILES, ids=lambda variable: variable.name)
def test_off_names_no_file_whatever_blanks_are_around_it(
    variable: OptionalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, " Off ")
    assert variable.is_off()
    monkeypatch.setenv(variable.name, " /tmp/off ")
    assert (variable.is_off(), variable.text()) == (False, "/tmp/off")


def test_lists_leave_out_what_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.FROZEN_KERNELS.name, f" a.json {os.pathsep}{os.pathsep} b c.json")
    assert variables.FROZEN_KERNELS.items() == ["a.json", "b c.json"]
    monkeypatch.setenv(variables.KERNEL_CLASSES.name, " a:B, ,c:D,")
    assert variables.KERNEL_CLASSES.items() == ["a:B", "c:D"]


def test_names_that_only_look_like_ours_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_CANNARY", "0")
    assert "BLOCKTUNE_CANNARY" in unknown_names()
    assert not set(VARIABLES) & set(unknown_names())


def test_a_tuner_that_cannot_be_installed_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch calls it in every process that imports it; Triton may be missing or broken there."""

    def fail() -> None:
        raise ImportError("No module named 'triton'")

    monkeypatch.setenv(variables.AUTOTUNE.name, "1 ")
    monkeypatch.setattr(autoload, "_install", fail)
    autoload.install_by_environment()
    (warning,) = warnings_in(caplog)
    assert "BLOCKTUNE_AUTOTUNE=1: ImportError: No module named 'triton'" in warning
