"""Smaller cases that fail in the same way."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from tools.differential.runs.kinds import error_kind

Document = dict[str, Any]

NEEDED = ("kind", "seed")
NEEDED_OF_KIND = ("entry", "dtype", "head_dim", "head_dim_v")
LENGTHS = ("seqlen_q", "seqlen_k")
SIMPLE_DIMS = (16, 64)


def smaller(document: Document) -> Iterator[Document]:
    """Cases with one thing less, simpler or shorter, of which some may be no cases at all."""
    for name in document:
        if name not in NEEDED:
            yield {each: value for each, value in document.items() if each != name}
    kind = document["kind"]
    for name in kind:
        if name not in NEEDED_OF_KIND:
            yield document | {"kind": {each: value for each, value in kind.items() if each != name}}
    for dim in SIMPLE_DIMS:
        if (kind["head_dim"], kind["head_dim_v"]) not in ((dim, dim), (SIMPLE_DIMS[0],) * 2):
            yield document | {"kind": kind | {"head_dim": dim, "head_dim_v": dim}}
    yield from _shorter(document)


def _shorter(document: Document) -> Iterator[Document]:
    lengths = {name: document[name] for name in LENGTHS if name in document}
    if lengths:
        yield document | {name: max(1, length // 2) for name, length in lengths.items()}
    for name, length in lengths.items():
        yield from (document | {name: less} for less in dict.fromkeys((length // 2, length - 1)) if less > 0)
    sequences = document.get("sequences", [])
    for place, (queries, keys) in enumerate(sequences):
        without = [*sequences[:place], *sequences[place + 1 :]]
        if without:
            yield document | {"sequences": without}
        if max(queries, keys) > 1:
            less = deepcopy(sequences)
            less[place] = [queries // 2, keys // 2]
            yield document | {"sequences": less}
    cached = document.get("cached", [])
    if len(cached) > 1:
        yield {name: own for name, own in document.items() if name != "batch"} | {"cached": cached[:1]}


def is_alike(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two failures ended in the same way."""
    same = record["verdict"] == other["verdict"]
    return same and (not record.get("message") or error_kind(record) == error_kind(other))


class Shrinking:
    """Jobs of ever smaller cases: `jobs` is for a pool of one worker, `add` for its results."""

    def __init__(self, record: Document) -> None:
        self.smallest = record
        self._last: Document | None = None

    def jobs(self) -> Iterator[Document]:
        """One case after the other; each begins with the smallest one that has failed."""
        found = True
        while found:
            found = False
            for document in smaller(self.smallest["case"]):
                self._last = None
                yield {"case": document}
                if self._last is not None and is_alike(self.smallest, self._last):
                    self.smallest, found = self._last, True
                    break

    def add(self, record: Document) -> None:
        """Takes the result of the last job."""
        self._last = record
