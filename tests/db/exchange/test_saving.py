"""Where results are written: files at once, into devices and pipes, never through another user's link."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from blocktune.cli.main import app
from blocktune.cli.output.json_files import write_atomically
from blocktune.db.exchange.document import save_text
from tests.support.command_line import CliRunner
from tests.support.stores.filled_stores import filled
from tests.support.stores.sample_records import sample_trials, winner

SAVE = "import sys; from blocktune.db.exchange.document import save_text; save_text('{}', sys.argv[1])"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_stays_a_device(tmp_path: Path) -> None:
    null = tmp_path / "null"
    try:
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this container may not make devices")
    link = tmp_path / "link"
    link.symlink_to(null)
    for path in (null, link):
        save_text("{}", path)
    assert stat.S_ISCHR(null.stat().st_mode)
    assert link.is_symlink()


@pytest.mark.timeout(30)
def test_a_pipe_is_written_into(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=save_text, args=("{}", pipe))
    writer.start()
    while "is a pipe that nothing reads yet" not in caplog.text:
        time.sleep(0.01)
    assert pipe.read_text() == "{}"
    writer.join()
    assert pipe.is_fifo()
    caplog.clear()
    content = "{}" * 200_000  # more than a pipe holds
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        time.sleep(0.5)
        writer = threading.Thread(target=save_text, args=(content, pipe))
        writer.start()
        assert reader.communicate()[0].decode() == content
        writer.join()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_the_standard_output_by_its_name(name: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-P", "-c", SAVE, name], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "{}"
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert Path("/dev/stdout").is_symlink()
    piped = subprocess.run([sys.executable, "-P", "-c", SAVE, name], capture_output=True, text=True, check=True)
    assert piped.stdout == "{}"


@pytest.mark.parametrize("save", [save_text, lambda text, path: write_atomically(path, text)])
def test_a_link_in_a_predictable_place_is_not_followed(save, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (".a.json.new", ".a.json.", "a.json"):
        (tmp_path / name).symlink_to(victim)
    save("{}", tmp_path / "a.json")
    assert victim.read_text() == "mine"
    assert (tmp_path / "a.json").read_text() == "{}"


def test_a_long_name_and_a_directory(tmp_path: Path) -> None:
    save_text("{}", tmp_path / ("n" * 250))
    with pytest.raises(IsADirectoryError):
        save_text("{}", tmp_path)
    assert os.listdir(tmp_path) == ["n" * 250]


@pytest.mark.parametrize("through_a_link", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        "export {} --device h200",
        "freeze {} --device h200",
        "export {} --format csv",
        "export {} --format triton --device h200",
        "report {} --out {}",
    ],
)
def test_no_output_takes_the_place_of_a_database(command: str, through_a_link: bool, tmp_path: Path) -> None:
    """`tune export my.db` was meant as `--db my.db`, and cost all that was measured."""
    if "report" in command:
        pytest.importorskip("vl_convert", reason="charts need vl-convert-python")
    path = tmp_path / "mine.db"
    filled(path, winner(), sample_trials(1)[0], 2)
    before, place = path.read_bytes(), tmp_path / "link" if through_a_link else path
    if through_a_link:
        place.symlink_to(path)
    done = CliRunner().invoke(app, command.format(place, place).split(), env={"BLOCKTUNE_DB": str(path)})
    assert done.exit_code == 2
    assert "it is a database" in done.stderr
    assert path.read_bytes() == before
