"""Device memory that counts: what every launch of an algorithm reads and writes, with and without a cache.

`tests/support/models/io_walks.py` computes attention out of it, so that the counts are those of loops
that give right results.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class CountingMemory:
    """Named arrays. Inside `launch`, `load`, `store` and `add` count the bytes of the elements that they touch."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays: dict[str, Any] = dict(arrays)
        self._launch = ""
        self._bytes: dict[tuple[str, str, str], int] = defaultdict(int)
        self._touched: dict[tuple[str, str, str], Any] = {}

    @contextmanager
    def launch(self, name: str) -> Iterator[None]:
        self._launch = name
        yield
        self._launch = ""

    def load(self, name: str, index: Any) -> Any:
        """The elements as float32; masks as they are."""
        found = self._count("read", name, index)
        return found if found.dtype == np.bool_ else found.astype(np.float32)

    def store(self, name: str, index: Any, value: Any) -> None:
        self._count("written", name, index)
        self.arrays[name][index] = value

    def add(self, name: str, index: Any, value: Any) -> None:
        """An addition where the memory is."""
        self._count("added", name, index)
        self.arrays[name][index] += value

    def counted(self, *, perfect_l2: bool) -> dict[str, dict[str, int]]:
        """Bytes by launch, then by tensor_read, _written or _added; with perfect_l2 of different elements a launch."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        for key, bytes_ in self._bytes.items():
            launch, way, name = key
            once = int(self._touched[key].sum()) * self.arrays[name].itemsize
            found[launch][f"{name}_{way}"] = once if perfect_l2 else bytes_
        return dict(found)

    def _count(self, way: str, name: str, index: Any) -> Any:
        assert self._launch, "outside of a launch nothing moves"
        key = (self._launch, way, name)
        found = self.arrays[name][index]
        self._bytes[key] += found.nbytes
        touched = self._touched.setdefault(key, np.zeros(self.arrays[name].shape, bool))
        touched[index] = True
        return found
