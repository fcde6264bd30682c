"""The table of a results file that ships: how many of its winners were measured with the kernels as they are now."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_json
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.errors import UsageError
from tools.pages.document_tables import markdown_table

NO_WINNERS = "No winners ship yet: `tune export blocktune/results/DEVICE.json --device DEVICE` writes them."


def is_shipped(path: Path) -> bool:
    """Return whether the file holds winners: the names of all other results say what they hold."""
    return "." not in path.stem


def block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: a winner is of a kernel that does not exist.
    """
    return shipped_table(read_json(path)) if path.exists() else NO_WINNERS


def shipped_table(document: Mapping[str, Any]) -> str:
    """Return one row a kernel, under a sentence that sums them up."""
    winners = document["bests"]
    everyone, present = Counter(map(_kernel, winners)), Counter(map(_kernel, filter(_is_present, winners)))
    device, now, earlier = document["device"]["name"], present.total(), len(winners) - present.total()
    caption = (
        f"Of the {len(winners)} winners that ship for {device}, {now} were measured with the kernels as they are now, "
        f"and {earlier} with earlier sources of theirs: these serve as borrowed until `tune verify` times them again."
    )
    rows = ([f"`{name}`", f"{count}", f"{present[name]}"] for name, count in sorted(everyone.items()))
    return f"{caption}\n\n{markdown_table(('kernel', 'winners', 'of its present source'), rows)}"


def _kernel(winner: Mapping[str, Any]) -> str:
    return str(winner["config"]["kernel"])


def _is_present(winner: Mapping[str, Any]) -> bool:
    """Return whether the winner was measured with its kernel's present source."""
    kernel = KERNELS.get(_kernel(winner))
    if kernel is None:
        raise UsageError(
            f"A shipped winner is of {_kernel(winner)}, which is not among the kernels {', '.join(KERNELS)}. Withdraw "
            "it."
        )
    return bool(winner["kernel_hash"] == kernel.source_hash)
