"""Programs of this repository that are not packaged: pages of the documents, benches, checks and fuzzers.

Tests start some of them as processes of their own.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS, SHIPPED = ROOT / "results", ROOT / "blocktune" / "results"
"""The records of the repository, and those of them that ship with the package."""


def python(code: str) -> tuple[str, ...]:
    """Return the command that runs this code where `tests` and `tools` can be imported; its arguments follow.

    The repository comes last on the path, so that its folders hide no installed package.
    """
    return (sys.executable, "-P", "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{code}")


def program(name: str) -> tuple[str, ...]:
    """Return the command that runs a module of this folder; its arguments follow."""
    return python(f"import runpy; runpy.run_module({f'{__name__}.{name}'!r}, run_name='__main__', alter_sys=True)")
