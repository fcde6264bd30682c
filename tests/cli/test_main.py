"""What all commands have in common: help, exit codes, messages, start-up time."""

import logging
import os
import re
import subprocess
import sys

import pytest
import typer

from blocktune.cli import main
from blocktune.kernels.hardware.driver import DriverReport
from blocktune.kernels.values import errors
from tests.support.command_line import CliRunner

quick_typer = pytest.mark.skipif(
    tuple(map(int, typer.__version__.split(".")[:2])) < (0, 17), reason="Typer before 0.17 loads Rich with itself"
)
EXIT_CODES = {
    errors.UsageError: 2,
    errors.UnknownDeviceError: 2,
    errors.NoFeasibleConfigError: 3,
    errors.NoDeviceError: 4,
    errors.StoreError: 5,
    errors.SchemaTooNewError: 5,
    errors.NothingMeasuredError: 6,
    errors.VerificationError: 7,
}


@pytest.mark.parametrize("error", EXIT_CODES, ids=lambda error: error.__name__)
def test_an_error_is_one_paragraph_on_stderr_and_its_exit_code(
    error: type[errors.BlocktuneError], tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error("the rule, the values, the way out")

    monkeypatch.setattr("blocktune.kernels.hardware.device.present_devices", fail)
    result = tune("devices", "--json")
    assert result.exit_code == EXIT_CODES[error]
    assert result.stdout == ""
    assert result.stderr == "error: the rule, the values, the way out\n"


def test_an_interrupt_is_130(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blocktune.kernels.hardware.device.present_devices", interrupt)
    assert tune("devices").exit_code == 130


def run_as_tune(code: str) -> tuple[str, str]:
    """Run code that makes a function `work`, with it in the place of the commands; returns what it printed."""
    code += "main.app = work\ntry:\n    main.main()\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    return result.stdout, result.stderr


def test_an_interrupt_that_python_ignores_comes_again() -> None:
    """Python prints what an object's end raises and goes on, Ctrl-C too."""
    code = (
        "import os, signal, time\n"
        "from blocktune.cli import main\n"
        "class Ending:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for _ in range(1000): pass\n"
        "def work():\n"
        "    Ending()\n"
        "    time.sleep(100)\n"
    )
    assert run_as_tune(code) == ("interrupted\n", "")


def test_an_interrupt_that_comes_again_spares_the_hook_that_asks_for_it() -> None:
    """Python would print it there, as it prints whatever a hook raises, and go on: Ctrl-C would be lost."""
    code = (
        "import signal, sys, time\n"
        "from blocktune.cli import main\n"
        "set_timer = signal.setitimer\n"
        "def late(*times):\n"
        "    set_timer(*times)\n"
        "    if times[1]: main.raise_interrupt(signal.SIGALRM, sys._getframe(1))\n"
        "main.signal.setitimer = late\n"
        "class Ending:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "def work():\n"
        "    Ending()\n"
        "    time.sleep(100)\n"
    )
    assert run_as_tune(code) == ("interrupted\n", "")


def test_an_error_of_the_program_itself_is_not_hidden(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("blocktune.kernels.hardware.device.present_devices", fail)
    assert isinstance(tune("devices").exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-command"],
        ["run"],
        ["run", "--seq", "x", "--dim", "64"],
        ["run", "--seq", "0", "--dim", "64"],
        ["run", "--seq", "64", "--dim", "-1"],
        ["run", "--seq", "64", "--dim", "64", "--heads", "6", "--kv-heads", "4"],
        ["run", "--seq", "64", "--dim", "64", "--dtype", "fp4"],
        ["run", "--seq", "64", "--dim", "64", "--device", "h2000"],
        ["run", "--seq", "64", "--dim", "64", "--kernel", "no_such_kernel"],
        ["best", "--seq", "64", "--dim", "0"],
        ["list", "--device", "h2000"],
        ["import", "no-such-file.json"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_2_says_why_and_prints_no_data(tune, words: list[str]) -> None:
    result = tune(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "rror" in result.stderr
    assert "Traceback" not in result.stderr
    assert not tune.db.exists()


@pytest.mark.parametrize("name", main.MOVED)
@pytest.mark.parametrize("words", [(), ("--help",), ("--no-such-flag", "place")])
def test_a_command_of_the_lab_says_in_one_sentence_where_it_went(tune, name: str, words: tuple[str, ...]) -> None:
    result = tune(name, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: `tune {name}` is `tune lab {name}` now.\n"
    assert tune("lab", name, "--help").exit_code == 0


def test_the_help_lists_about_twenty_commands_in_groups(tune) -> None:
    groups = re.findall(r"^(\w+):\n((?:  .*\n?)+)", tune("--help").stdout.split("Options:")[1], re.MULTILINE)
    listed = {title: re.findall(r"^  (\w+) ", lines, re.MULTILINE) for title, lines in groups}
    assert list(listed) == list(main.COMMANDS)
    names = [name for names in listed.values() for name in names]
    assert sorted(names) == sorted(typer.main.get_command(main.app).commands)
    assert len(names) <= 24
    assert not set(main.MOVED) & set(names)


@pytest.mark.parametrize("command", ["bench", "lab noise", "verify"])
def test_a_command_that_needs_a_gpu_advises_no_flag_that_it_lacks(
    tune, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = DriverReport(problem="No NVIDIA driver is installed.")
    monkeypatch.setattr("blocktune.kernels.hardware.device.read_driver", lambda: report)
    monkeypatch.setattr("blocktune.kernels.hardware.device.read_torch", lambda: report)
    words = [] if command == "verify" else ["--seq", "512", "--dim", "64"]
    result = tune(*command.split(), *words)
    assert result.exit_code == 4
    assert "No NVIDIA driver is installed. Use a machine with one" in result.stderr
    for flag in re.findall(r"`tune (\w+) (--\w+)", result.stderr):
        assert flag[1] in CliRunner().invoke(main.app, [flag[0], "--help"]).stdout


def test_what_is_logged_keeps_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("blocktune.cli.output.render._width", lambda stream: 40)
    record = logging.LogRecord(
        "blocktune", logging.WARNING, "here.py", 1, "%s does not answer. " * 4, ("NVML",) * 4, None
    )
    main.Notes().handle(record)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(lines).split() == ["NVML", "does", "not", "answer."] * 4


def test_what_is_logged_stands_on_stderr_as_it_is() -> None:
    code = (
        "import logging\n"
        "from blocktune.cli import main\n"
        "def work():\n"
        "    logging.getLogger('blocktune').info('of no interest')\n"
        "    logging.getLogger('blocktune').warning('NVML does not answer.')\n"
    )
    assert run_as_tune(code) == ("", "NVML does not answer.\n")


def test_the_version_is_that_of_the_package(tune) -> None:
    from importlib.metadata import version

    assert tune("--version").stdout == f"blocktune {version('blocktune')}\n"


@quick_typer
def test_help_answers_within_half_a_second() -> None:
    """Of a processor, since other processes may hold this machine."""
    command = [sys.executable, "-P", "-c", "from blocktune.cli.main import main; main()", "--help"]
    assert any(_processor_seconds(command) < 0.5 for _ in range(10))  # the first that is fast enough is the last


def _processor_seconds(command: list[str]) -> float:
    before = os.times()
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "100"})
    after = os.times()
    assert "occupancy" in answer.stdout
    return after.children_user - before.children_user + after.children_system - before.children_system


@quick_typer
@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["best", "--help"], ["occupancy", "--help"]], ids=str)
def test_help_loads_no_heavy_package(words: list[str]) -> None:
    script = (
        "import sys\n"
        "from blocktune.cli.main import app\n"
        f"app({words!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'triton', 'optuna', 'sqlalchemy', 'alembic', 'rich', 'pynvml'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_a_warning_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    main.show_warning("the device differs", UserWarning, "device.py", 1)
    assert capsys.readouterr().err == "warning: the device differs\n"


@pytest.mark.parametrize("module", ["blocktune", "blocktune.cli.main"])
def test_the_command_line_runs_as_a_module(module: str) -> None:
    answer = subprocess.run([sys.executable, "-P", "-m", module, "--version"], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout.split()[0]) == (0, "blocktune")


@pytest.mark.parametrize(("encoding", "sign"), [("ascii", "?"), ("latin-1", "?"), ("utf-8", "≤")])
def test_an_output_of_another_encoding_is_printed(encoding: str, sign: str) -> None:
    words = ["occupancy", "--cc", "9.0", "--warps", "4", "--regs", "168", "--shared", "115712"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-P", "-m", "blocktune", *words]
    answer = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert f"you need {sign} 76,800 B" in answer.stdout.decode(encoding)


def run_with_a_reader_that_leaves(code: str) -> subprocess.CompletedProcess[bytes]:
    """Runs Python code whose standard output is a pipe whose reading end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run([sys.executable, "-P", "-c", code], stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    answer = run_with_a_reader_that_leaves(
        "import sys; sys.argv[1:] = ['occupancy', '--cc', '9.0', '--warps', '4', '--regs', '168', '--shared', '0']\n"
        "from blocktune.cli.main import main; main()"
    )
    assert (answer.returncode, answer.stderr) == (0, b"")


def test_the_broken_pipe_of_a_worker_is_not_taken_for_that(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError

    monkeypatch.setattr("blocktune.kernels.hardware.device.present_devices", fail)
    monkeypatch.setattr(main, "_reader_has_left", lambda stream: False)
    assert isinstance(tune("devices").exception, BrokenPipeError)
