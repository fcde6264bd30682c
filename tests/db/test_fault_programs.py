"""Bounded parts of what `make fault-test` does with full counts: tools/stores/faults.py."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.stores.postgres_server import need_server
from tools import program
from tools.pages.command_reference import leaf_commands
from tools.stores import Unavailable, io_faults
from tools.stores.changed_exports import imports
from tools.stores.faults import Work, run_program
from tools.stores.hostile_files import EVERY
from tools.stores.input.flips import flips
from tools.stores.input.starts import starts
from tools.stores.server.disk import full_disks
from tools.stores.server.network import network
from tools.stores.server.stops import server_stops
from tools.stores.server.versions import versions

exhaustive = pytest.mark.exhaustive


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make the failing calls with")
@pytest.mark.parametrize("errors", [6, pytest.param(100, marks=exhaustive)])
def test_a_failing_disk_loses_nothing_that_was_acknowledged(tmp_path: Path, errors: int) -> None:
    told = io_faults.run(tmp_path, errors, seed=errors)
    assert told["wrong"] == []
    assert told["errors"] == errors


@pytest.mark.parametrize("tried", [500, pytest.param(10_000, marks=exhaustive)])
def test_a_changed_export_is_taken_whole_or_refused(tmp_path: Path, tried: int) -> None:
    lost, wrong, note = imports(tmp_path, tried, seed=tried)
    assert (lost, wrong) == (0, 0)
    assert not note.startswith("0 were taken")


@pytest.mark.exhaustive
def test_what_a_killed_search_of_a_locked_store_acknowledged_is_stored(tmp_path: Path) -> None:
    found = run_program("killed_locked", tmp_path, 2, 0)
    assert found["lost"] == 0
    assert found["acknowledged"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("tried", [20, pytest.param(200, marks=exhaustive)])
def test_what_a_command_reads_of_a_damaged_file_is_sound_or_said_to_be_short(tried: int) -> None:
    command = [*program("stores.faults"), "--only", "answers", "--runs", str(tried), "--seed", str(tried)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    assert f"tried={tried}, lost=0, wrong=0" in found.stderr


@exhaustive
def test_every_command_ends_well_on_hostile_files(tmp_path: Path) -> None:
    assert run_program("hostile_files", tmp_path, 3, 0)["broken"] == []


def test_every_command_that_ends_is_tried_on_hostile_files() -> None:
    missed = {name for name in leaf_commands() if not any(f"{line} ".startswith(f"{name} ") for line in EVERY)}
    assert missed == {"ui"}


@pytest.mark.parametrize("tried", [30, pytest.param(500, marks=exhaustive)])
def test_a_flipped_bit_of_any_file_is_refused_or_changes_nothing(tmp_path: Path, tried: int) -> None:
    pytest.importorskip("cryptography", reason="signed files need cryptography")
    assert flips(tmp_path, tried, seed=tried)[:2] == (0, 0)


@pytest.mark.parametrize("runs", [25, pytest.param(500, marks=exhaustive)])
def test_no_command_shows_a_password(tmp_path: Path, runs: int) -> None:
    assert run_program("input.passwords", tmp_path, runs, runs)["broken"] == []


@exhaustive
def test_files_without_an_end_are_refused(tmp_path: Path) -> None:
    assert run_program("input.endless_files", tmp_path, 3, 0)["broken"] == []


@exhaustive
def test_production_starts_in_odd_circumstances(tmp_path: Path) -> None:
    assert starts(tmp_path, 3, seed=0) == (0, 0, "")


@exhaustive
def test_the_first_call_of_production_is_right_in_time_and_small(tmp_path: Path) -> None:
    assert run_program("first_calls", tmp_path, 10, 0)["wrong"] == []


@exhaustive
def test_a_server_that_is_stopped_again_and_again_loses_nothing(tmp_path: Path) -> None:
    need_server()
    assert server_stops(tmp_path, 10, seed=0)[:2] == (0, 0)


@exhaustive
@pytest.mark.parametrize(("work", "tried"), [(network, 40), (full_disks, 6), (versions, 3)])
def test_a_server_behind_a_bad_network_on_a_full_disk_and_of_two_versions_loses_nothing(
    tmp_path: Path, work: Work, tried: int
) -> None:
    need_server()
    try:
        lost, wrong, note = work(tmp_path, tried, seed=0)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert (lost, wrong) == (0, 0), note
