"""Code that one machine compiled is found by another one's launches, and nothing else comes along."""

import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.compiler import compile_key, compiled_code, has_code
from blocktune.tuner.compile.shipped_code import KERNELS, RESULTS, ShippedCode, packed_code, unpack_code
from blocktune.tuner.compile_server.farm import CompileFarm
from tests.support.fakes.faked_compiles import faked_compiles

CC = (8, 0)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return faked_compiles(monkeypatch, tmp_path)


def compiled_in(folder: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch, *kernels: str, need_code: bool) -> Any:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / KERNELS))
    cache = ResourceCache(folder / RESULTS)
    with CompileFarm(
        workers=1, cache=cache, need_code=need_code, kernels="tests.support.fakes.compile_fakes:get_kernel"
    ) as farm:
        return [farm.submit(name, fakes.config(name), fakes.SHAPE, CC).result() for name in kernels]


def test_code_from_elsewhere_is_found_and_not_compiled_again(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    made, broken = compiled_in(there, fakes, monkeypatch, "product", "broken", need_code=False)
    code = packed_code(there)
    shutil.rmtree(there)
    spec = fakes.get_kernel("product").compile_spec(fakes.config("product"), fakes.SHAPE)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here / KERNELS))
    assert not has_code(spec, compile_key(spec, CC))
    unpack_code(code, here / KERNELS, here / RESULTS)
    assert has_code(spec, compile_key(spec, CC))
    (found,) = compiled_in(here, fakes, monkeypatch, "product", need_code=True)
    assert (found.cached, found.resources) == (True, made.resources)
    assert broken.resources is None
    assert len(list((here / RESULTS).iterdir())) == 1  # what did not compile there is tried here
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    assert len(compiled_code(spec, CC).asm["cubin"]) > 0
    assert before == {path: path.stat().st_mtime_ns for path in here.rglob("*")}


def test_files_that_are_there_stay_and_more_than_the_bound_stays_behind(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for name in ("a", "b"):
        (there / KERNELS / name).mkdir(parents=True)
        (there / KERNELS / name / "code.ptx").write_bytes(name.encode())
    one = len(zlib.compress(b"a", 1))
    assert list(packed_code(there, 2 * one).kernels) == ["a", "b"]
    assert list(packed_code(there, 2 * one - 1).kernels) == ["a"]
    (here / KERNELS / "a").mkdir(parents=True)
    (here / KERNELS / "a" / "code.ptx").write_text("of this machine")
    unpack_code(packed_code(there), here / KERNELS, here / RESULTS)
    assert (here / KERNELS / "a" / "code.ptx").read_text() == "of this machine"
    assert (here / KERNELS / "b" / "code.ptx").read_text() == "b"
    assert not list(here.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["..", "../x", "/etc/x", "", "a/b"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    text = zlib.compress(b"x")
    group = {"__grp__code.json": zlib.compress(b'{"child_paths": {"%s": "/x"}}' % name.encode())}
    for code in (
        ShippedCode({name: {"code.ptx": text}}, {}),
        ShippedCode({"a": {name: text}}, {}),
        ShippedCode({"a": group}, {}),
        ShippedCode({}, {name: text}),
    ):
        with pytest.raises(UsageError, match="plain file names"):
            unpack_code(code, tmp_path / KERNELS, tmp_path / RESULTS)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
