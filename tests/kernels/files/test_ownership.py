"""Files that somebody else can change: production refuses them, and the doctor says why."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.records.records import Best
from blocktune.db.store import ResultStore
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.files.ownership import doubts
from blocktune.kernels.registry import get_kernel
from blocktune.runtime.store_reader.sources import JsonConfigs, SqliteConfigs, read_source
from tests.support.fakes.dispatch_fakes import H200, best, shape_like

pytestmark = pytest.mark.triton_free

SHAPE = shape_like(dtype="bfloat16")
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def winner() -> Best:
    kernel = get_kernel("flash_fwd")
    return best(SHAPE, kernel.default_config(SHAPE, H200.limits), kernel_hash=kernel.source_hash)


@pytest.fixture(params=["store", "frozen file"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    if request.param == "frozen file":
        save_text(canonical_text(frozen_document(H200, [winner()])), folder / "h200.json")
        return folder / "h200.json"
    with ResultStore.open(folder / "blocktune.db") as store:
        store.set_best(winner())
    return folder / "blocktune.db"


def read(path: Path) -> tuple[int, str]:
    """How many configs production takes, and what it says."""
    found, problems = read_source(JsonConfigs(path) if path.suffix == ".json" else SqliteConfigs(path), H200)
    return len(found), "; ".join(problems)


def owned_by_another(file: Path) -> Path:
    os.chown(file, 12345, 12345)
    return file


def writable_by_all(file: Path) -> Path:
    file.chmod(0o666)
    return file


def folder_of_all(file: Path) -> Path:
    file.parent.chmod(0o777)
    return file


def link_of_another(file: Path) -> Path:
    link = file.with_name(f"link{file.suffix}")
    link.symlink_to(file)
    os.chown(link, 12345, 12345, follow_symlinks=False)
    return link


def link_in_a_folder_of_all(file: Path) -> Path:
    folder = file.parent.parent / "open"
    folder.mkdir()
    folder.chmod(0o777)
    link = folder / file.name
    link.symlink_to(file)
    return link


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(owned_by_another, "belongs to user 12345", marks=ROOT),
        (writable_by_all, "every user may write"),
        (folder_of_all, "every user may replace files"),
        pytest.param(link_of_another, "belongs to user 12345", marks=ROOT),
        (link_in_a_folder_of_all, "every user may replace files"),
    ],
)
def test_what_another_user_can_change_is_refused_unless_it_is_meant(
    spoil: Callable[[Path], Path], reason: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOCKTUNE_TRUST_OWNER", raising=False)
    assert read(file) == (1, "")
    place = spoil(file)
    count, problem = read(place)
    assert count == 0
    assert reason in problem
    assert "BLOCKTUNE_TRUST_OWNER=1" in problem
    monkeypatch.setenv("BLOCKTUNE_TRUST_OWNER", "1")
    assert read(place) == (1, "")


@ROOT
@pytest.mark.parametrize(("mode", "count"), [(0o1777, 0), (0o775, 1)])
def test_a_log_that_any_user_may_have_put_beside_a_store_is_refused(tmp_path: Path, mode: int, count: int) -> None:
    """That of a group's store is made by whoever of the group came first."""
    path = tmp_path / "blocktune.db"
    with ResultStore.open(path) as store:
        store.set_best(winner())
    log = Path(f"{path}-wal")
    log.touch()
    os.chown(log, 12345, 12345)
    tmp_path.chmod(mode)
    found, problem = read(path)
    assert found == count
    assert ("blocktune.db-wal belongs to user 12345" in problem) == (not count)


def test_a_folder_with_the_sticky_bit_and_a_group_that_writes_are_believed(file: Path) -> None:
    file.parent.chmod(0o1777)
    file.chmod(0o664)
    assert read(file) == (1, "")


def test_nothing_is_said_of_what_is_not_there(tmp_path: Path) -> None:
    assert list(doubts(tmp_path / "none" / "such.db")) == []
