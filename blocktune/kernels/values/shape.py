"""What the caller asks for: the shape of one attention problem."""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from blocktune.kernels.values.errors import UsageError, require_type
from blocktune.kernels.values.features import MAX_SIZE, NO_FEATURES, UNLIMITED, Features, canonical
from blocktune.kernels.values.features import Causal as Causal

if TYPE_CHECKING:
    import torch

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}
"""Bytes per element of every data type that the kernels take."""

FP8 = "float8_e4m3fn"

SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", FP8: "fp8"}


_Choice = TypeVar("_Choice", bound=StrEnum)


class Direction(StrEnum):
    """Which computation of attention is meant."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class AttentionShape:
    """One attention problem: q [batch, num_heads, seqlen_q, head_dim], k [batch, num_heads_kv, seqlen_k, head_dim],
    v [batch, num_heads_kv, seqlen_k, head_dim_v]."""

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: Causal
    direction: Direction
    features: Features

    def __init__(
        self,
        *,
        batch: int,
        num_heads: int,
        seqlen_q: int,
        head_dim: int,
        num_heads_kv: int | None = None,
        seqlen_k: int | None = None,
        head_dim_v: int | None = None,
        dtype: "str | torch.dtype" = "bfloat16",
        causal: Causal | str | bool = Causal.NONE,
        direction: Direction | str = Direction.FORWARD,
        features: Features | str = NO_FEATURES,
    ) -> None:
        """Make a shape of values as callers have them. Causal mask and window become the `canonical` ones.

        Args:
            batch: sequences.
            num_heads: query heads.
            seqlen_q: queries of a sequence.
            head_dim: of queries and keys.
            num_heads_kv: key/value heads, as many as query heads unless given.
            seqlen_k: keys of a sequence, as many as queries unless given.
            head_dim_v: of the values, that of the keys unless given.
            dtype: one of `ELEMENT_BYTES`, its short name (`bf16`), or PyTorch's data type.
            causal: True is PyTorch's mask (`upper_left`).
            direction: `forward` or `backward`.
            features: the features, or their label.

        Raises:
            UsageError: a size is not a positive integer of 31 bits, num_heads is not a multiple of num_heads_kv, or a
                name is unknown.
        """
        sizes = {
            "batch": batch,
            "num_heads": num_heads,
            "num_heads_kv": num_heads if num_heads_kv is None else num_heads_kv,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_q if seqlen_k is None else seqlen_k,
            "head_dim": head_dim,
            "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
        }
        _require_sizes(sizes)
        mask, asked = _causal_member(causal), Features.parse(features) if isinstance(features, str) else features
        require_type("features", asked, Features, 'Write Features(softcap=True), or its label "softcap".')
        mask, asked = _canonical(mask, asked, sizes["seqlen_q"], sizes["seqlen_k"])
        kind = {"dtype": _dtype_name(dtype), "causal": mask, "features": asked}
        for name, value in (sizes | kind | {"direction": _member(Direction, "direction", direction)}).items():
            object.__setattr__(self, name, value)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes per element of keys and values: 1 of an 8-bit cache."""
        return 1 if self.features.is_short else self.element_bytes

    @property
    def out_dtype(self) -> str:
        """Of the output: 8 bits are too few for it."""
        return "bfloat16" if self.dtype == FP8 else self.dtype

    @property
    def out_bytes(self) -> int:
        """Bytes per element of the output."""
        return ELEMENT_BYTES[self.out_dtype]

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_heads_kv

    @property
    def causal_offset(self) -> int:
        """Query i sees keys 0..i + causal_offset; only meaningful for a causal shape."""
        return self.seqlen_k - self.seqlen_q if self.causal is Causal.LOWER_RIGHT else 0

    @property
    def diagonal(self) -> int:
        """The key that query 0 stands at, for windows and ALiBi: from the lower right unless causal from the upper left
        (as FlashAttention-2 has it)."""
        return 0 if self.causal is Causal.UPPER_LEFT else self.seqlen_k - self.seqlen_q

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that take part. Mask tensors and packed lengths are not known here: every pair
        counts that causal mask and window let through."""
        left, right = self.features.window or (UNLIMITED, UNLIMITED)
        if self.causal is not Causal.NONE:
            right = 0
        hidden = 0 if left == UNLIMITED else self._pairs_up_to(self.diagonal - left - 1)
        return (
            self.seqlen_q * self.seqlen_k if right == UNLIMITED else self._pairs_up_to(self.diagonal + right)
        ) - hidden

    def _pairs_up_to(self, offset: int) -> int:
        """Return the number of (query, key) pairs with key - query at most `offset`."""
        first = min(max(0, -offset), self.seqlen_q)  # the first query that sees a key
        last = min(max(first, self.seqlen_k - offset), self.seqlen_q)  # the first query that sees all keys
        triangle = (first + last + 1 + 2 * offset) * (last - first) // 2
        return triangle + (self.seqlen_q - last) * self.seqlen_k

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two: 2 * (head_dim + head_dim_v) a visible pair and query head. A backward counts
        2.5 times as much, as everyone counts it: five products instead of two, however many a kernel makes."""
        forward = 2 * (self.head_dim + self.head_dim_v) * self.visible_pairs * self.batch * self.num_heads
        return forward * 5 // 2 if self.direction is Direction.BACKWARD else forward

    @property
    def tensor_bytes(self) -> int:
        """Device memory of q, k, v, the output and the log-sum-exp; of a backward also of the four gradients."""
        queries = self.batch * self.num_heads * self.seqlen_q
        keys = self.batch * self.num_heads_kv * self.seqlen_k
        tensors = (
            queries * self.head_dim * self.element_bytes + keys * (self.head_dim + self.head_dim_v) * self.kv_bytes
        )
        tensors += queries * self.head_dim_v * self.out_bytes
        return tensors * (2 if self.direction is Direction.BACKWARD else 1) + 4 * queries

    @property
    def label(self) -> str:
        """A short name for people, such as `b2 h32 s8192 d64 bf16 causal`."""
        heads = f"h{self.num_heads}" if self.group_size == 1 else f"h{self.num_heads}/{self.num_heads_kv}"
        seq = f"s{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"s{self.seqlen_q}/{self.seqlen_k}"
        dim = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        words = [f"b{self.batch}", heads, seq, dim, SHORT_DTYPES[self.dtype]]
        if self.causal is Causal.UPPER_LEFT:
            words.append("causal")
        elif self.causal is Causal.LOWER_RIGHT:
            words.append("causal-lower-right")
        words += [self.features.label] if self.features else []
        words += ["backward"] if self.direction is Direction.BACKWARD else []
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _FIELDS}
        features = values.pop("features")  # absent without any: older documents stay equal
        document = {key: str(value) if isinstance(value, StrEnum) else value for key, value in values.items()}
        return document | ({"features": features.label} if features else {})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the shape that `to_json` wrote.

        Raises:
            UsageError: a field is unknown, missing or out of range.
        """
        if not isinstance(data, dict):
            raise UsageError(f"A shape must be an object with the fields of `to_json`, but got {data!r:.100}.")
        if unknown := set(data).difference(_FIELDS):
            raise UsageError(
                f"A shape has no {', '.join(sorted(unknown))}. Its fields are {', '.join(sorted(_FIELDS))}."
            )
        missing = [name for name in _SIZES if name not in data]
        if missing:
            raise UsageError(f"A stored shape needs {', '.join(_SIZES)}, but {', '.join(missing)} is missing.")
        for name, known in _STORED_NAMES.items():
            if name in data and data[name] not in known:
                raise UsageError(
                    f"`{name}` of a stored shape must be one of {', '.join(known)}, but got {data[name]!r:.100}."
                )
        try:
            return cls(**data)
        except (TypeError, ValueError) as error:
            raise UsageError(f"Not a shape: {error}") from error


def require_shape(given: Any) -> None:
    """Check that an argument is a shape.

    Raises:
        WrongTypeError: it is something else.
    """
    way_out = "Such as AttentionShape(batch=2, num_heads=32, seqlen_q=8192, head_dim=64)."
    require_type("shape", given, AttentionShape, way_out)


def _canonical(causal: Causal, features: Features, seqlen_q: int, seqlen_k: int) -> tuple[Causal, Features]:
    """Return the causal mask and the features with the window that stand for all that mean the same."""
    varies = features.varlen or features.cached
    causal, window = canonical(causal, features.window, seqlen_q, seqlen_k, varies=varies)
    return causal, features if window == features.window else replace(features, window=window)


_FIELDS = tuple(field.name for field in fields(AttentionShape))
_SIZES = _FIELDS[:7]
_STORED_NAMES = {"dtype": tuple(ELEMENT_BYTES), "causal": tuple(Causal), "direction": tuple(Direction)}


def _require_sizes(sizes: dict[str, Any]) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value <= 0:
            raise UsageError(f"`{name} > 0` must hold, but got {name}={value!r:.80}. Give a positive integer.")
        if value > MAX_SIZE:
            raise UsageError(f"`{name} <= {MAX_SIZE}` must hold, but got a number of {value.bit_length()} bits.")
    heads, heads_kv = sizes["num_heads"], sizes["num_heads_kv"]
    if heads % heads_kv:
        raise UsageError(
            f"`num_heads % num_heads_kv == 0` must hold, but got (num_heads={heads}, num_heads_kv={heads_kv}). "
            "Each key/value head serves an equal group of query heads."
        )


def _dtype_name(dtype: object) -> str:
    """Return the name of a data type that is given by its name, its short name or as PyTorch's own."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    name = _LONG_DTYPES.get(name, name)
    if name not in ELEMENT_BYTES:
        raise UsageError(f"`dtype` must be one of {', '.join(ELEMENT_BYTES)}, but got {dtype!r:.80}.")
    return name


_LONG_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}


def _causal_member(causal: Causal | str | bool) -> Causal:
    if isinstance(causal, bool):
        return Causal.UPPER_LEFT if causal else Causal.NONE
    return _member(Causal, "causal", causal)


def _member(kind: type[_Choice], name: str, value: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"`{name}` must be one of {', '.join(kind)}, but got {value!r:.80}.") from None
