"""Writes `constraints-lowest.txt`: the lowest version of every package that pyproject.toml names with a lower bound.

python -m tools.checks.lowest_versions > constraints-lowest.txt
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
HEADER = """\
# The lowest version of each direct dependency: `make test-lowest` tests the command line with them, under Python 3.11.
# Made from pyproject.toml by `python -m tools.checks.lowest_versions`.
"""


def lowest_versions() -> dict[str, str]:
    """Return the lower bounds of pyproject.toml by package, in alphabetical order."""
    bounds = {
        requirement.name: bound.version
        for requirement in _requirements()
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    return dict(sorted(bounds.items()))


def _requirements() -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group in (project["dependencies"], *project["optional-dependencies"].values()):
        yield from map(Requirement, group)


def constraints() -> str:
    """Return the text of the file."""
    return HEADER + "".join(f"{name}=={version}\n" for name, version in lowest_versions().items())


if __name__ == "__main__":
    print(constraints(), end="")
