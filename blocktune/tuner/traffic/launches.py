"""The traffic of kernels that need several launches, launch by launch, as Nsight Compute counts it.

    traffic = Passes(passes=(Pass(name="split", read={"k": 4096}, written={"partial": 512}), ...))
    traffic.total_bytes, traffic.passes[0].read_bytes

What one launch leaves to the next goes through device memory; a workspace that fits L2 may never leave it, so that a
GPU can stay below these counts. Lengths, tables of pages, lists of blocks and tile counters are a few bytes for every
tile of thousands, and are not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.traffic.model import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(Traffic):
    """One launch: bytes by tensor, read, written, and added to what is in memory.

    An addition happens where the memory is: it reads and writes its place there, while the multiprocessor sends the
    addend and gets nothing back.
    """

    name: str
    read: Mapping[str, int] = field(hash=False)
    written: Mapping[str, int] = field(hash=False)
    added: Mapping[str, int] = field(hash=False, default_factory=dict)

    @property
    def read_bytes(self) -> int:
        return self.arriving_bytes + sum(self.added.values())

    @property
    def written_bytes(self) -> int:
        return sum(self.written.values()) + sum(self.added.values())

    @property
    def arriving_bytes(self) -> int:
        """What enters the multiprocessors."""
        return sum(self.read.values())

    def to_json(self) -> dict[str, Any]:
        """Return every tensor's bytes, and what they move in all, added bytes twice."""
        read = {f"{name}_read": bytes_ for name, bytes_ in self.read.items()}
        written = {f"{name}_written": bytes_ for name, bytes_ in self.written.items()}
        added = {f"{name}_added": bytes_ for name, bytes_ in self.added.items()}
        return read | written | added | {"total_bytes": self.total_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes(Traffic):
    """All launches of a config, in order."""

    passes: tuple[Pass, ...]

    @property
    def read_bytes(self) -> int:
        return sum(one.read_bytes for one in self.passes)

    @property
    def written_bytes(self) -> int:
        return sum(one.written_bytes for one in self.passes)

    @property
    def arriving_bytes(self) -> int:
        """What enters the multiprocessors."""
        return sum(one.arriving_bytes for one in self.passes)

    def __getitem__(self, name: str) -> Pass:
        """Return the launch with this name."""
        return next(one for one in self.passes if one.name == name)

    def to_json(self) -> dict[str, Any]:
        return {one.name: one.to_json() for one in self.passes} | {"total_bytes": self.total_bytes}


def query_rows(shape: AttentionShape) -> int:
    """Return the rows of the query, of all heads and entries."""
    return shape.batch * shape.num_heads * shape.seqlen_q


def key_rows(shape: AttentionShape) -> int:
    """Return the rows of the key, of all heads and entries."""
    return shape.batch * shape.num_heads_kv * shape.seqlen_k


def mask_traffic(shape: AttentionShape, pairs: int, *, perfect_l2: bool) -> int:
    """Count the bytes of a mask tensor that serves all heads and entries: one element for every (query, key) pair of
    the tiles that a head visits, by each head or, with perfect_l2, once. An additive mask has the tensors' data
    type."""
    return pairs * mask_elements_bytes(shape) * (1 if perfect_l2 else shape.batch * shape.num_heads)


def mask_elements_bytes(shape: AttentionShape) -> int:
    """Return the bytes of an element of the shape's mask tensor; 0 without one."""
    return {MaskKind.BOOLEAN: 1, MaskKind.ADDITIVE: shape.element_bytes}.get(shape.features.mask, 0)


def mask_bits(shape: AttentionShape) -> int:
    """Return how many times fewer bytes a mask tensor has once it is laid out: a boolean one becomes bits."""
    return 8 if shape.features.mask is MaskKind.BOOLEAN else 1


def mask_pass(shape: AttentionShape) -> Pass:
    """Count the launch that lays out a mask tensor which serves all heads and entries."""
    whole = shape.seqlen_q * shape.seqlen_k * mask_elements_bytes(shape)
    return Pass(name="mask", read={"mask": whole}, written={"laid": whole // mask_bits(shape)})


def with_mask(read: dict[str, int], mask_bytes: int) -> dict[str, int]:
    """Return what is read, and the mask tensor if there is one."""
    return read | ({"mask": mask_bytes} if mask_bytes else {})
