"""One call of an attention function, as a document from which it can be made again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from tools.differential.cases.enums import PACKED_SEQUENCES, Alignment, Entry, Mode, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileClass:
    """What calls share that are served by the same few compiled kernels.

    heads_kv, group: key heads, and query heads for each of them. square: as many queries as keys. lengths: `any`,
    `odd` or `sixteen` (multiples of 16). order: of batch, head and row in memory, or `any`. regime: `few` queries,
    `tiny`, `short`, `medium` or `long`; octave: of `few` and `long`, the logarithm of the fewest keys. mask:
    `none`, `boolean`, `additive` (of the type) or `float32`. mask_sizes: which dimensions of (batch, head, query,
    key) the mask has, as `bhqk` with 1 for one element for all; of batch and head cases may differ, unless the
    mask's rows have an odd length in memory (mask_row_odd). page_size: of a cache, and of packed keys. picked,
    padded: an index picks the entries of a contiguous cache, whose first rows hold no keys. cache_type: of a cache
    of 8 bits; scales: what its numbers are multiplied with, one `number`, or one for each of the `heads`, for each
    head of the `batch`, for all `tokens`, or `none` at all. traced: the calls go through PyTorch's tools, which
    takes seconds a case.
    """

    entry: Entry
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool = False
    mask: str = "none"
    gradients: bool = False
    heads_kv: int = 1
    group: int = 1
    regime: str = "short"
    square: bool = False
    octave: int = 9
    alignment: Alignment = Alignment.NATURAL
    lengths: str = "any"
    order: str = "any"
    rank: int = 4
    refusals: bool = False
    mask_row_odd: bool = False
    mask_sizes: str = "bhqk"
    mask_transposed: bool = False
    slopes_by_batch: bool = False
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    page_size: int = 0
    sinks: bool = False
    picked: bool = False
    padded: bool = False
    cache_type: str = ""
    scales: str = ""
    traced: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether sequences are packed one after the other."""
        return self.entry in PACKED_SEQUENCES

    @property
    def is_plain(self) -> bool:
        """Whether the call takes PyTorch's arguments: masks, and causal from the upper left."""
        return self.entry in (Entry.SDPA, Entry.TRANSFORMERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A view [batch, heads, rows, columns] of memory.

    order: of the outer dimensions, slowest first. padding: elements behind each row; offset: elements before the first;
    extra_rows: rows of the memory that the view leaves out. expanded: a dimension with one element for all.
    last_strided: the columns are not next to each other.
    """

    order: str = "bhs"
    padding: int = 0
    offset: int = 0
    extra_rows: int = 0
    expanded: str = ""
    last_strided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call. The sizes of packed sequences are in `sequences`, (queries, keys) each; cached: keys of every entry.

    num_splits: of the keys in a cache. rotary: how many numbers of a head are turned, interleaved: pairs of neighbours.
    slack: how much longer than the truth the longest packed sequences are said to be. unused: what stands in the places
    of a block table that no key needs, shared: the first pages belong to all entries. one_length: cache_seqlens is one
    number for all. apart: tensors beside query, key and value have other numbers between theirs.

    hidden: `some` pairs at random, `rows`: some queries see no key, `all`, `none`, `left` and `right` padding. hides:
    what an additive mask has for hidden pairs, `infinity`, the `least` number of the mask's type, that of the tensors
    (`least_of_type`), or `mixed`. stray: one element of an additive mask is that number. needs: which of query, key,
    value, an additive mask (m), slopes (a) and sinks (s) require gradients. dynamic: sizes are symbols to a compiler.
    unwritten: rows of a part that sees no key are not numbers. wrong: what makes the call wrong.
    """

    kind: CompileClass
    seed: int
    batch: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    query: Layout = Layout()
    key: Layout = Layout()
    value: Layout = Layout()
    grad: Layout = Layout()
    values: Values = Values.NORMAL
    scale: float | None = None
    mask_sizes: str = "bhqk"
    hidden: str = "some"
    needs: str = "qkv"
    mode: Mode = Mode.EAGER
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    deterministic: bool = False
    sequences: tuple[tuple[int, int], ...] = ()
    cached: tuple[int, ...] = ()
    appended: int = 0
    num_splits: int = 0
    rotary: int = 0
    interleaved: bool = False
    slack: tuple[int, int] = (0, 0)
    unused: str = ""
    shared: bool = False
    one_length: bool = False
    sliced: bool = False
    apart: bool = False
    hides: str = "infinity"
    stray: str = ""
    dynamic: bool = False
    unwritten: bool = False
    wrong: str = ""

    @property
    def heads(self) -> int:
        """Of the query."""
        return self.kind.heads_kv * self.kind.group

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return _change(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The case that `to_json` wrote."""
        values = dict(document)
        values["kind"] = _fill(CompileClass, values["kind"])
        for name in ("query", "key", "value", "grad"):
            if name in values:
                values[name] = Layout(**values[name])
        for name, make in (("values", Values), ("mode", Mode), ("window", tuple), ("cached", tuple), ("slack", tuple)):
            if name in values:
                values[name] = make(values[name])
        if "sequences" in values:
            values["sequences"] = tuple((queries, keys) for queries, keys in values["sequences"])
        return cls(**values)

    @property
    def text(self) -> str:
        """The document in one line."""
        return json.dumps(self.to_json(), separators=(",", ":"))


def class_to_json(kind: CompileClass) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return _change(kind)


def class_from_json(document: Mapping[str, Any]) -> CompileClass:
    """The class that `class_to_json` wrote."""
    return _fill(CompileClass, document)


def _change(value: Any) -> dict[str, Any]:
    changed = {}
    for field in fields(value):
        own = getattr(value, field.name)
        if isinstance(own, CompileClass):
            changed[field.name] = _change(own)
        elif own != field.default:
            changed[field.name] = asdict(own) if isinstance(own, Layout) else own
    return changed


def _fill(kind: type[CompileClass], document: Mapping[str, Any]) -> CompileClass:
    values = dict(document) | {"entry": Entry(document["entry"])}
    if "alignment" in values:
        values["alignment"] = Alignment(values["alignment"])
    return kind(**values)
