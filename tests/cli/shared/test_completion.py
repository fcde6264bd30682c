"""What a shell completes after the flags of `tune`."""

import subprocess
import sys

import pytest

from blocktune.cli.main import app
from blocktune.cli.shared import completion
from blocktune.kernels.hardware.catalogue import catalogue
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.shape import SHORT_DTYPES, Direction
from tests.support.command_line import CliRunner


def completed(words: str, incomplete: str = "") -> set[str]:
    """What `tune WORDS INCOMPLETE<TAB>` offers in bash."""
    line = f"tune {words} {incomplete}"
    environment = {"_TUNE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words.split()) + 1)}
    return set(CliRunner().invoke(app, [], prog_name="tune", env=environment).stdout.split())


def test_the_names_of_the_kernels_are_those_of_the_registry() -> None:
    assert sorted(completion.kernels("")) == sorted(KERNELS)


@pytest.mark.parametrize("command", ["run", "best", "list", "export x", "freeze x", "explain", "ladder", "occupancy"])
def test_devices_are_completed_wherever_one_is_named(command: str) -> None:
    assert completed(f"{command} --device") == {entry.id for entry in catalogue()}
    assert completed(f"{command} --device", "h2") == {entry.id for entry in catalogue() if entry.id.startswith("h2")}


@pytest.mark.parametrize("command", ["run", "explain", "occupancy"])
def test_kernels_are_completed(command: str) -> None:
    short = {"flash_decode8", "flash_decode8_hopper", "flash_decode8_ring"}
    assert completed(f"{command} --kernel", "flash_decode") == {"flash_decode", "flash_decode_hopper"} | short


def test_data_types_and_directions_are_completed() -> None:
    assert completed("run --dtype") == set(SHORT_DTYPES.values())
    assert completed("run --direction", "b") == {str(Direction.BACKWARD)}


def test_own_parameters_are_those_of_the_kernel_that_was_named() -> None:
    schedules = get_kernel("flash_fwd").parameters["schedule"]
    offered = completed("explain --kernel flash_fwd --param", "sched")
    assert offered == {f"schedule={schedule}" for schedule in schedules}
    assert completed("explain --param") == set()


def test_completing_loads_no_heavy_package() -> None:
    script = (
        "import sys\n"
        "from blocktune.cli.shared import completion\n"
        "list(completion.devices('')), list(completion.kernels('')), list(completion.dtypes(''))\n"
        "sys.exit(str({'torch', 'triton', 'sqlalchemy'} & set(sys.modules) or ''))\n"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert answer.stderr.strip() == ""
