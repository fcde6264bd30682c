"""What recorded sweeps are of: older sources, and kernels that are missing."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.lab.replay_file import read_replay
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tools.pages.searches.replay_tables import replay_tables, sources_text
from tools.pages.searches.sweep_sources import SweepSources, sources_of

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")
SHAPE = complete_shape(4096, 64)
NAMES = [kernel.name for kernel in kernels_for(SHAPE, H200.limits)]


def sweep(path: Path, shape: AttentionShape, kernels: list[str], hashes: list[str] | None = None) -> Path:
    columns: dict[str, Any] = {"config.kernel": kernels}
    columns["kernel_hash"] = hashes or [get_kernel(name).source_hash for name in kernels]
    document = {"shape": shape.to_json(), "device": H200.to_json(), "columns": columns}
    with gzip.open(path, "wt") as file:
        json.dump(document, file)
    return path


def test_sweeps_of_todays_kernels_lack_nothing(tmp_path: Path) -> None:
    whole = sweep(tmp_path / "a.gz", SHAPE, NAMES)
    assert sources_of([whole]) == SweepSources(older={}, missing={})
    assert sources_text(sources_of([whole])) == ""


def test_configs_of_older_sources_are_counted_by_kernel(tmp_path: Path) -> None:
    first, second = NAMES[:2]
    hashes = ["0" * 16, "0" * 16, get_kernel(first).source_hash]
    paths = [sweep(tmp_path / f"{count}.gz", SHAPE, [first, second, first], hashes) for count in range(2)]
    found = sources_of(paths)
    assert found.older == dict(sorted({first: 2, second: 2}.items()))
    assert sources_of(paths, without=[first]).older == {second: 2}
    assert "4 of the recorded configs are of older sources" in sources_text(found)


def test_a_kernel_that_came_later_is_missing(tmp_path: Path) -> None:
    paths = [sweep(tmp_path / "a.gz", SHAPE, NAMES[1:]), sweep(tmp_path / "b.gz", SHAPE, NAMES[1:])]
    assert sources_of(paths).missing == {NAMES[0]: 2}
    assert sources_of(paths, without=NAMES[:1]).missing == {}
    assert f"`{NAMES[0]}` in 2" in sources_text(sources_of(paths))


@pytest.mark.parametrize("part", ["strategies", "model", None])
def test_the_tables_say_it_first(part: str | None) -> None:
    document = read_replay(Path(__file__).parents[3] / "results" / "h200.replay.json")
    sources = SweepSources(older={"flash_bwd_fused": 7}, missing={})
    assert replay_tables(document, part, sources).startswith("Until the sweeps are recorded again: 7 of the recorded")
    assert "recorded again" not in replay_tables(document, part)
