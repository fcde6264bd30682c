"""The folder for Hugging Face's Hub: loaded as its package `kernels` does, without `blocktune` and next to it."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.test_slim import HIDING, NEEDED
from tests.support.distributions import ROOT, linked_environment
from tools.package.hub_kernel import VARIANT, write_hub_kernel

LOADED = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

path = Path(sys.argv[1])
spec = spec_from_file_location(sys.argv[2], path)
kernel = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(kernel)
"""
"""How the loader imports a file under a name."""

BY_KERNELS = """
import sys
from pathlib import Path
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]).parents[2])
"""

CALLS = """
import torch
from torch.nn.functional import scaled_dot_product_attention as expected

q, k, v = torch.randn(3, 2, 4, 64, 32)
attend = torch.compile(lambda q, k, v: kernel.attention(q, k, v, is_causal=True), fullgraph=True, backend="aot_eager")
torch.testing.assert_close(kernel.attention(q, k, v), expected(q, k, v))
torch.testing.assert_close(attend(q, k, v), expected(q, k, v, is_causal=True))
rows = [x.transpose(1, 2) for x in (q, k, v)]
torch.testing.assert_close(kernel.flash_attn_func(*rows).transpose(1, 2), expected(q, k, v))
shape = kernel.AttentionShape(batch=2, num_heads=32, seqlen_q=8192, head_dim=64)
print(kernel.best_config(shape, "h200").rung)
"""

IS_ALONE = "print([name for name in sys.modules if name.partition('.')[0] == 'blocktune'])"

KNOWN = """
registry, hashes = (sys.modules[f"{kernel.__name__}.kernels.{name}"] for name in ("registry", "files.known_hashes"))
assert hashes._hashes()
found = {name: each.source_hash for name, each in registry.KERNELS.items()}
"""

BESIDE = """
import blocktune
from blocktune.kernels.registry import KERNELS

print(found == {name: each.source_hash for name, each in KERNELS.items()})
ours = blocktune.AttentionShape(batch=2, num_heads=32, seqlen_q=8192, head_dim=64)
print(blocktune.best_config(ours, "h200").config.label == kernel.best_config(shape, "h200").config.label)
attend = torch.compile(lambda q, k, v: blocktune.attention(q, k, v), fullgraph=True, backend="aot_eager")
torch.testing.assert_close(attend(q, k, v), expected(q, k, v))
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    write_hub_kernel(folder)
    return folder / "build" / VARIANT


def printed(program: str, python: Path, file: Path, environment: dict[str, str]) -> list[str]:
    name = json.loads((file.parents[file.parent.name == "blocktune"] / "metadata.json").read_text())["id"]
    command = [python, "-P", "-W", "ignore", "-c", program, file, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("place", ["__init__.py", "blocktune/__init__.py"])
def test_it_is_loaded_without_blocktune(variant: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    hidden = {"HIDDEN": " ".join(("blocktune", "pynvml", *NEEDED)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    alone = os.environ | hidden | {"PYTHONPATH": str(tmp_path), "BLOCKTUNE_DB": str(tmp_path / "none.db")}
    found = printed(LOADED + CALLS + IS_ALONE, Path(sys.executable), variant / place, alone)
    assert found == ["exact", "[]"]


def test_it_runs_next_to_blocktune_and_knows_its_sources(variant: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = printed(LOADED + CALLS + KNOWN + BESIDE, Path(sys.executable), variant / "__init__.py", environment)
    assert found == ["exact", "True", "True"]


def test_it_imports_itself_relatively_and_nothing_but_torch_and_triton(variant: Path) -> None:
    files = list(variant.rglob("*.py"))
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    froms = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    tops = {name.partition(".")[0] for name in froms | names}
    late = {"cryptography", "diffusers", "opentelemetry", "prometheus_client", "pynvml", "transformers"}
    assert tops - set(sys.stdlib_module_names) - late == {"torch", "triton", "typing_extensions"}


def test_a_second_build_is_the_same_to_the_byte(variant: Path, tmp_path: Path) -> None:
    write_hub_kernel(tmp_path)
    again = tmp_path / "build" / VARIANT
    names = {path.relative_to(again) for path in again.rglob("*.*")}
    assert names == {path.relative_to(variant) for path in variant.rglob("*.*")}
    assert [name for name in names if (again / name).read_bytes() != (variant / name).read_bytes()] == []


@pytest.mark.exhaustive
def test_the_loader_of_the_hub_takes_it(variant: Path, tmp_path: Path) -> None:
    """`kernels` is installed for this test alone: transformers looks for it, and acts otherwise where it is."""
    python = linked_environment(tmp_path / "environment", "torch", "triton", "numpy")
    command = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "kernels>=0.17"]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if installed.returncode:
        pytest.skip(f"pip brings no `kernels`: {installed.stderr.strip()[-200:]}")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert printed(BY_KERNELS + CALLS + IS_ALONE, python, variant / "__init__.py", environment) == ["exact", "[]"]
