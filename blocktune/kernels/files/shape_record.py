"""The shapes that a process computes attention of, as tables of the TOML file that BLOCKTUNE_RECORD names:

    BLOCKTUNE_RECORD=shapes.toml python train.py
    tune bench --shapes shapes.toml

The file is written when the process ends. Without the variable nothing is recorded, and nothing waits.
"""

import atexit
import errno
import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from blocktune.kernels.files.file_path import FOR_ALL, replace_file
from blocktune.kernels.files.reading import open_file
from blocktune.kernels.files.variables import RECORD
from blocktune.kernels.values.shape import SHORT_DTYPES, AttentionShape, Causal, Direction

logger = logging.getLogger("blocktune")

MAX_SHAPES = 1000
"""Of a file, the first: a model that decodes token by token has a new shape with every step."""

_HEAD_BYTES = 16 << 10
"""Of a file that exists: its first shape has to begin here."""


class ShapeRecord:
    """The shapes of a process, and the file that gets them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shapes: dict[AttentionShape, None] = {}
        self._is_full = False

    def add(self, shape: AttentionShape) -> None:
        """Record a shape once, unless there are as many as the file takes."""
        if len(self._shapes) < MAX_SHAPES:
            self._shapes[shape] = None
        else:
            self._is_full |= shape not in self._shapes

    def forget(self) -> None:
        """Start empty, as a forked child must: its parent writes the parent's shapes."""
        self._shapes, self._is_full = {}, False

    def write(self) -> None:
        """Write the file as a whole; a process without a shape leaves it as it is. A place that cannot be written costs
        a warning."""
        if not self._shapes:
            return
        if self._is_full:
            logger.warning("Only the first %d shapes are in %s.", MAX_SHAPES, self._path)
        try:
            _require_replaceable(self._path)
            text = "\n".join(map(table_of, list(self._shapes)))  # threads may still add to it
            replace_file(self._path, text.encode(), FOR_ALL)
        except OSError as error:
            logger.warning("Shapes are not recorded: %s cannot be written (%s).", self._path, error.strerror)


def table_of(shape: AttentionShape) -> str:
    """Return a shape as a table of TOML, with the keys of the shape flags."""
    return "".join(
        [f"# {shape.label}\n[[shape]]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in _flags(shape))]
    )


def record(shape: AttentionShape | None) -> None:
    """Record a shape of this process, if the environment names a file and it is one; called once for every plan."""
    if shape is not None and (found := _record()) is not None:
        found.add(shape)


def _require_replaceable(path: Path) -> None:
    """Check that there is no file yet, an empty one or one of shapes: the variable may name another one by mistake.

    Raises:
        OSError: it is a directory, a device or a file of something else.
    """
    try:
        with open_file(path) as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return
    if head and b"[[shape]]" not in map(bytes.strip, head.splitlines()):
        raise OSError(errno.EEXIST, "it is a file of something else, and is left as it is", str(path))


def _flags(shape: AttentionShape) -> list[tuple[str, Any]]:
    """Return what the flags of a shape must say; switches and words that say nothing are left out."""
    sizes: Mapping[str, Any] = {
        "batch": shape.batch,
        "heads": shape.num_heads,
        "kv-heads": shape.num_heads_kv,
        "seq": shape.seqlen_q,
        "seq-k": shape.seqlen_k,
        "dim": shape.head_dim,
        "dim-v": shape.head_dim_v,
        "dtype": SHORT_DTYPES[shape.dtype],
    }
    words: Mapping[str, Any] = {
        "causal": shape.causal is Causal.UPPER_LEFT,
        "causal-lower-right": shape.causal is Causal.LOWER_RIGHT,
        "direction": "backward" if shape.direction is Direction.BACKWARD else "",
        "features": shape.features.label,
    }
    return [*sizes.items(), *((key, value) for key, value in words.items() if value)]


@cache
def _record() -> ShapeRecord | None:
    """Return the record of the process; None where the environment names no file."""
    named = RECORD.text()
    if not named:
        return None
    try:
        path = Path(os.path.expanduser(named)).absolute()  # the program may change its directory
    except OSError as error:
        logger.warning("Shapes are not recorded: the directory of %s is not known (%s).", named, error.strerror)
        return None
    made = ShapeRecord(path)
    atexit.register(made.write)
    os.register_at_fork(after_in_child=made.forget)
    return made
