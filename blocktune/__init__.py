"""Fastest block sizes for Triton attention, found, explained, kept and dispatched.

    from blocktune import attention

    out = attention(query, key, value, is_causal=True)  # torch.nn.functional.scaled_dot_product_attention, tuned

Importing this package loads neither torch nor triton; the first use of a name below loads what it needs.
"""

import re
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from blocktune.kernels.values.bindings import bind
from blocktune.kernels.values.errors import needing

# The one list of public names, which type checkers and editors read too.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", _STUB, re.MULTILINE)}
__all__ = sorted([*_HOMES, "__version__"])

# not public: what a room takes from one above it
bind(
    {
        "pictures_of": "blocktune.cli.report.notebook",
        "text_of_analysis": "blocktune.tuner.cost.text",
        "text_of_occupancy": "blocktune.tuner.occupancy.text",
        "usefulness": "blocktune.tuner.cost.ranking",
    }
)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, and keep it.

    Raises:
        MissingPackageError: it needs a package that is not installed.
        AttributeError: there is no such name.
    """
    if name == "__version__":
        value: Any = metadata.version("blocktune")
    elif name in _HOMES:
        home = _HOMES[name]
        with needing("tune", f"`blocktune.{name}`"):
            value = import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)
    else:
        raise AttributeError(f"module 'blocktune' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
