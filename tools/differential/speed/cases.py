"""Calls that are drawn by a seed, over what callers of PyTorch's attention may ask for."""

import random
from dataclasses import dataclass

from blocktune.kernels.values.features import NO_FEATURES, Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction

MAX_MULTIPLICATIONS = 1 << 40
"""Of queries with keys in a case: about a millisecond of an H200."""
MAX_MASK_ELEMENTS = 1 << 28
MAX_CACHE_ELEMENTS = 1 << 31

GROUPS = ("prefill", "short", "decoding", "other keys", "mask", "training")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCase:
    """One call.

    group: which part of the draw it belongs to. mask: `none`, `boolean` or `additive`, of [seqlen_q, seqlen_k].
    backward: the gradients are timed. length_first: [batch, seqlen, heads, head_dim] in memory.
    """

    group: str
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    causal: bool = False
    mask: str = "none"
    backward: bool = False
    length_first: bool = True

    @property
    def label(self) -> str:
        """The call in a line."""
        words = [self.group, f"b{self.batch} h{self.num_heads}/{self.num_heads_kv} s{self.seqlen_q}/{self.seqlen_k}"]
        words += [f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")]
        words += [self.dtype, "causal" if self.causal else "full"]
        words += [] if self.mask == "none" else [f"{self.mask} mask"]
        words += ["backward"] if self.backward else []
        words += [] if self.length_first else ["heads first"]
        return " ".join(words)

    @property
    def shape(self) -> AttentionShape:
        """The shape of the direction that is timed."""
        return AttentionShape(
            batch=self.batch,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            causal=Causal.UPPER_LEFT if self.causal else Causal.NONE,
            direction=Direction.BACKWARD if self.backward else Direction.FORWARD,
            features=Features(mask=MaskKind(self.mask)) if self.mask != "none" else NO_FEATURES,
        )


def drawn_cases(seed: int, count: int) -> list[SpeedCase]:
    """Return so many cases, the same ones for the same seed, of all groups in turns."""
    draw = random.Random(seed)
    return [_draw(draw, GROUPS[number % len(GROUPS)]) for number in range(count)]


def _draw(draw: random.Random, group: str) -> SpeedCase:
    while True:
        case = _candidate(draw, group)
        if _fits(case):
            return case


def _candidate(draw: random.Random, group: str) -> SpeedCase:
    head_dim = _head_dim(draw)
    heads_kv, per_group = draw.choice((1, 2, 4, 8, 12, 16)), draw.choice((1, 1, 1, 2, 4, 7, 8, 16))
    seqlen_q = _length(draw, *_QUERIES[group])
    seqlen_k = seqlen_q if group not in ("decoding", "other keys") else _length(draw, 32, 65536)
    return SpeedCase(
        group=group,
        batch=draw.choice((1, 1, 2, 3, 4, 8, 16, 32)),
        num_heads=heads_kv * per_group,
        num_heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim if draw.random() < 0.9 else _head_dim(draw),
        dtype=draw.choices(("bfloat16", "float16", "float32"), (12, 6, 1))[0],
        causal=group not in ("decoding", "other keys", "mask") and draw.random() < 0.6,
        mask=draw.choice(("boolean", "additive")) if group == "mask" else "none",
        backward=group == "training",
        length_first=draw.random() < 0.8,
    )


_QUERIES = {
    "prefill": (512, 16384),
    "short": (1, 512),
    "decoding": (1, 16),
    "other keys": (16, 8192),
    "mask": (16, 4096),
    "training": (64, 8192),
}
"""The fewest and the most queries of a group."""


def _head_dim(draw: random.Random) -> int:
    """Return 64 or 128 often, other multiples of 8 to 256 as often, and now and then any number."""
    share = draw.random()
    if share < 0.45:
        return draw.choice((64, 128))
    return 8 * draw.randrange(1, 33) if share < 0.93 else draw.randrange(1, 257)


def _length(draw: random.Random, least: int, most: int) -> int:
    """Return a length between two, any octave as likely as another, and every third a round one."""
    octave = draw.uniform(least.bit_length() - 1, most.bit_length() - 1)
    length = max(least, min(most, round(2**octave)))
    return length if draw.random() < 0.67 else 1 << (length.bit_length() - 1)


def _fits(case: SpeedCase) -> bool:
    pairs = case.seqlen_q * case.seqlen_k
    width = case.head_dim + case.head_dim_v
    return (
        case.batch * case.num_heads * pairs * width <= MAX_MULTIPLICATIONS >> (2 * case.backward)
        and case.batch * case.num_heads_kv * case.seqlen_k * width <= MAX_CACHE_ELEMENTS
        and (case.mask == "none" or pairs <= MAX_MASK_ELEMENTS)
    )
