"""What switches of the environment take, and that each of them says so where it is set to something else."""

import subprocess
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from blocktune import autoload
from blocktune.kernels.files import ownership
from blocktune.kernels.files.switch import is_switched_on
from blocktune.kernels.selection import canary
from blocktune.kernels.tuned import summary
from blocktune.kernels.tuned.settings import STRICT_VARIABLE, Settings
from blocktune.kernels.values.errors import StoreError, UsageError
from tests.programs import python

pytestmark = pytest.mark.triton_free

IS_INSTALLED = any(point.value.startswith("blocktune") for point in entry_points(group="torch.backends"))

SWITCHES: dict[str, Callable[[], Any]] = {
    autoload.VARIABLE: autoload.install_by_environment,
    canary.VARIABLE: canary.is_on,
    ownership.VARIABLE: ownership.is_owner_believed,
    STRICT_VARIABLE: Settings().of_environment,
    summary.VARIABLE: summary.tell_at_exit,
}


@pytest.mark.parametrize("variable", SWITCHES)
@pytest.mark.parametrize("said", ["ture", "2", " 1", "\x1b[0m"])
def test_a_switch_that_says_neither_yes_nor_no_is_an_error(
    variable: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, said)
    with pytest.raises(UsageError) as caught:
        SWITCHES[variable]()
    text = str(caught.value)
    assert text.startswith(f"{variable} must be 1 or 0, but got {said!r}. Set it to ")
    assert text.isprintable()


@pytest.mark.parametrize("unless_set", [True, False])
def test_a_switch_is_on_off_or_not_set(unless_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWITCH", raising=False)
    assert is_switched_on("SWITCH", "", unless_set=unless_set) is unless_set
    found = {}
    for said in ("", "1", "on", "YES", "True", "0", "OFF", "no", "false"):
        monkeypatch.setenv("SWITCH", said)
        found[said] = is_switched_on("SWITCH", "", unless_set=unless_set)
    assert found.pop("") is unless_set
    assert list(found.values()) == [True] * 4 + [False] * 4


@pytest.mark.skipif(not IS_INSTALLED, reason="PyTorch calls the entry points of installed packages alone.")
def test_an_import_of_torch_says_what_is_wrong_with_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autoload.VARIABLE, "ture")
    done = subprocess.run(python("import torch"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{autoload.VARIABLE} must be 1 or 0, but got 'ture'" in done.stderr


def test_a_store_of_another_user_is_refused_whatever_the_switch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with the variable is said where the file would be read."""
    store = tmp_path / "results.json"
    store.touch(mode=0o666)
    store.chmod(0o666)
    monkeypatch.setenv(ownership.VARIABLE, "ture")
    with pytest.raises(StoreError, match="must be 1 or 0"):
        ownership.require_trusted(store)
