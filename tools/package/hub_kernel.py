"""Writes a folder in the layout of Hugging Face's Hub, from which their package `kernels` loads attention.

    python -m tools.package.hub_kernel dist/hub

    from kernels import get_local_kernel
    blocktune = get_local_kernel(Path("dist/hub"))
    out = blocktune.attention(query, key, value)

A loader imports `build/torch-universal/__init__.py` under a name of its own, and several versions in one process. So
imports in the copy are relative, and its name is new with every change. It holds what `blocktune.attention` needs: the
kernels, the dispatcher and the shipped results.
"""

import argparse
import ast
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from blocktune.kernels.files.known_hashes import FILE as HASHES
from blocktune.kernels.files.known_hashes import digest

PACKAGE = Path(__file__).parents[2] / "blocktune"
ROOMS = ("flash_attn", "kernels", "results", "runtime")
NAME, VARIANT = "blocktune", "torch-universal"
VERSION = 1
"""Raised where a caller's code would break, as the Hub asks for; it loads by this number."""

OLD_PLACE = '''\
"""The package in the folder above, for loaders that look for a folder of the kernel's name."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location("{identity}", Path(__file__).parents[1] / "__init__.py")
_package = sys.modules[_spec.name] = module_from_spec(_spec)
_spec.loader.exec_module(_package)
globals().update({{name: getattr(_package, name) for name in _package.__all__}})
'''


def write_hub_kernel(folder: Path) -> str:
    """Write the layout into a folder, in place of an earlier one, and return the name of the package in it."""
    variant = folder / "build" / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    identity = f"_{NAME}_{digest_of_sources()}"
    for path in sources():
        target = variant / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            target.write_text(with_relative_imports(path.read_text(), len(path.relative_to(PACKAGE).parts)))
        else:
            shutil.copy(path, target)
    (variant / "__init__.py").write_text(root_module())
    (variant / NAME).mkdir()
    (variant / NAME / "__init__.py").write_text(OLD_PLACE.format(identity=identity))
    (variant / "kernels" / HASHES.name).write_text(renamed_hashes(identity, digest(variant / "kernels")))
    (variant / "metadata.json").write_text(json.dumps(metadata(identity), indent=2) + "\n")
    return identity


def sources() -> Iterator[Path]:
    """Yield the files that the package consists of, in a fixed order."""
    for room in ROOMS:
        yield from sorted(path for path in (PACKAGE / room).rglob("*.*") if path.suffix in {".py", ".csv", ".json"})


def digest_of_sources() -> str:
    """Return 12 hexadecimal digits that change with every file."""
    found = hashlib.sha256()
    for path in sources():
        found.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def with_relative_imports(text: str, depth: int) -> str:
    """Return the text of a module in which imports of this package are relative.

    Args:
        text: what it is.
        depth: how many parts the path of its file has below the package.
    """
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == NAME:
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = re.sub(rf"\bfrom {NAME}\.?", f"from {'.' * depth}", line, count=1)
    return "".join(lines)


def root_module() -> str:
    """Return the text of the root, with the public names that need neither a store nor a search."""
    listed = (PACKAGE / "__init__.pyi").read_text()
    imports = re.findall(rf"^from {NAME}\.((?:{'|'.join(ROOMS)})\S*) import (\w+) as", listed, re.MULTILINE)
    names = "".join(f'    "{name}",\n' for _, name in imports)
    lines = "".join(f"from .{module} import {name}\n" for module, name in imports)
    return f'"""Attention for NVIDIA GPUs that needs no tuning."""\n\n{lines}\n__all__ = [\n{names}]\n'


def renamed_hashes(identity: str, folder_digest: str) -> str:
    """Return the text of the known source hashes for the package under another name."""
    hashes = json.loads(HASHES.read_text())["hashes"]
    renamed = {re.sub(rf"\b{NAME}\.", f"{identity}.", name): value for name, value in hashes.items()}
    return json.dumps({"digest": folder_digest, "hashes": renamed}, indent=1) + "\n"


def metadata(identity: str) -> dict[str, object]:
    """Return what the loader wants to know: Python packages besides PyTorch and Triton are none."""
    return {
        "id": identity,
        "name": NAME,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(write_hub_kernel(parser.parse_args().folder))
