"""What compiles are remembered, and that nothing wrong in the folder stops the work."""

import json
import logging
import random
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.compile.cache import FORMAT, ResourceCache
from blocktune.tuner.compile.compiler import CompileResult

KEY = "ab" * 32
CONFIG = KernelConfig("flash_fwd", 128, 64, 4, 3, extra=(("order", 1),))
RESOURCES = KernelResources(registers=168, shared_bytes=65536, num_warps=4, tensor_cores="wgmma", code_sha256="0f")
OK = CompileResult(config=CONFIG, outcome=Outcome.OK, resources=RESOURCES, seconds=1.5)
ERROR = CompileResult(config=CONFIG, outcome=Outcome.COMPILE_ERROR, error="CompilationError: no", seconds=0.5)


def remembered(result: CompileResult) -> dict[str, Any]:
    return {
        "config": result.config,
        "outcome": result.outcome,
        "resources": result.resources,
        "error": result.error,
        "seconds": result.seconds,
    }


@pytest.mark.parametrize("result", [OK, ERROR])
def test_resource_cache_returns_what_was_put(tmp_path: Path, result: CompileResult) -> None:
    ResourceCache(tmp_path).put(KEY, result)
    found = ResourceCache(tmp_path).get(KEY)
    assert found is not None
    assert found.cached
    assert remembered(found) == remembered(result)


def test_resource_cache_forgets_timeouts(tmp_path: Path) -> None:
    cache = ResourceCache(tmp_path)
    cache.put(KEY, CompileResult(config=CONFIG, outcome=Outcome.COMPILE_TIMEOUT, error="too long"))
    assert cache.get(KEY) is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\x00",
        b"[]",
        json.dumps({"format": FORMAT}).encode(),
        lambda entry: entry | {"outcome": "wrong_result"},
        lambda entry: entry | {"resources": None},
        lambda entry: entry | {"resources": entry["resources"] | {"registers": "168"}},
        lambda entry: entry | {"resources": entry["resources"] | {"registers": -1}},
        lambda entry: entry | {"config": {"kernel": "x"}},
    ],
)
def test_resource_cache_drops_damage_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    cache = ResourceCache(tmp_path)
    cache.put(KEY, OK)
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(
        damage if isinstance(damage, bytes) else json.dumps(damage(json.loads(path.read_bytes()))).encode()
    )
    assert cache.get(KEY) is None
    assert str(path) in caplog.text
    cache.put(KEY, OK)
    assert cache.get(KEY) is not None


def test_resource_cache_returns_no_flipped_bit(tmp_path: Path) -> None:
    """A register more or less is a plausible number, and decides what fits on a multiprocessor."""
    cache, path, dice = ResourceCache(tmp_path), tmp_path / f"{KEY}.json", random.Random(0)
    cache.put(KEY, OK)
    content = path.read_bytes()
    for _ in range(500):
        damaged = bytearray(content)
        damaged[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        found = cache.get(KEY)
        assert found is None or remembered(found) == remembered(OK)


def test_resource_cache_another_format_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ResourceCache(tmp_path)
    cache.put(KEY, OK)
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    assert cache.get(KEY) is None
    assert not caplog.text


def test_resource_cache_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "blocktune" / "resources"
    ResourceCache(folder).put(KEY, OK)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)] == [0o700, 0o700]
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.json"]


def test_resource_cache_that_cannot_be_written_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ResourceCache(tmp_path / "file" / "resources")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            cache.put(KEY, OK)
    assert caplog.text.count("are not remembered") == 1


def test_resource_cache_writers_at_once(tmp_path: Path) -> None:
    def write_and_read(_: int) -> bool:
        cache = ResourceCache(tmp_path)
        cache.put(KEY, OK)
        return cache.get(KEY) is not None

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, range(64)))
    assert len(list(tmp_path.iterdir())) == 1
