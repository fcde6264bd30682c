"""Shapes that cover the pairs of head dimensions which compile to different code, for every kernel and architecture.

Kernels round a head dimension up to a tile width, which decides tiles, swizzles and descriptors; one that is not a tile
width is masked besides. So a width and a dimension below it stand for all that are rounded up to it.
"""

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal
from blocktune.tuner.candidates.space import SearchSpace

ARCHITECTURES = ((8, 0), (9, 0), (10, 0), (12, 0))
WIDTHS = (16, 32, 64, 128, 256)
DIMS = (*WIDTHS, 24, 40, 96, 192)
"""Widths of the portable kernels, dimensions that they pad, and the widths that kernels for Hopper have besides."""
TILES = (*WIDTHS, 96, 192)
DESCRIBED = ("flash_fwd_tma", "flash_fwd_hopper", "flash_fwd_hopper_short", "flash_fwd_fp8", "flash_bwd_hopper")
"""Kernels that the copy engine serves."""
NARROW_VALUES = ((64, 32), (32, 16), (128, 16), (40, 24))
"""Pairs at which ptxas 12.8 made wrong code (`wgmma_descriptors`): values of a narrower swizzle than the queries'."""
KEYS, MANY_KEYS = 512, 4096
SEED = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A shape that a kernel admits on one compute capability."""

    kernel: AttentionKernel
    shape: AttentionShape
    cc: tuple[int, int]

    def default(self) -> "Case":
        """Return the case of the kernel's default config."""
        return Case(self.kernel.default_config(self.shape, limits_for(self.cc)), self.shape, self.cc)


@dataclass(frozen=True, slots=True)
class Case:
    """A config for one shape on one compute capability."""

    config: KernelConfig
    shape: AttentionShape
    cc: tuple[int, int]

    @property
    def kernel(self) -> AttentionKernel:
        return get_kernel(self.config.kernel)

    @property
    def place(self) -> Place:
        return Place(self.kernel, self.shape, self.cc)

    def __str__(self) -> str:
        arch = f"sm_{limits_for(self.cc).sm_arch}"
        return "-".join((*self.config.label.split(" "), arch, *self.shape.label.split(" ")[2:])).replace("/", "x")


def default_case(
    kernel: AttentionKernel, cc: tuple[int, int], dims: tuple[int, int], dtype: str = "bfloat16"
) -> Case | None:
    """The kernel's default config for a shape of these head dimensions, or None if its rules refuse the shape."""
    shape = shape_for(kernel, cc, dims, dtype)
    return None if shape is None else Place(kernel, shape, cc).default()


def shape_for(
    kernel: AttentionKernel,
    cc: tuple[int, int],
    dims: tuple[int, int],
    dtype: str = "bfloat16",
    causal: Causal = Causal.UPPER_LEFT,
    seqlen_k: int = KEYS,
) -> AttentionShape | None:
    """A shape with these head dimensions that the kernel admits, or None if its rules refuse it. seqlen_k: at
    least; some kernels are for many keys."""
    features, queries, keys = _form(kernel)
    causal = causal if queries > 1 else Causal.NONE
    if keys > KEYS and causal is Causal.UPPER_LEFT:
        causal = Causal.LOWER_RIGHT
    shape = _shape(kernel, features, queries, dims, dtype, causal, max(seqlen_k, keys))
    return shape if kernel.unsupported(shape, limits_for(cc)) is None else None


@cache
def _form(kernel: AttentionKernel) -> tuple[str, int, int]:
    """The features, queries and keys of the plainest shape that the kernel admits on Hopper, where all of them run."""
    words = "", "softcap", "block_sparse", "cached kv=int8"
    for keys, width, features, queries in itertools.product((KEYS, MANY_KEYS), (64, 128), words, (512, 1)):
        shape = _shape(kernel, features, queries, (width, width), "bfloat16", Causal.NONE, keys)
        if kernel.unsupported(shape, limits_for((9, 0))) is None:
            return features, queries, keys
    raise AssertionError(f"no form of {kernel.name} runs on Hopper")


def _shape(
    kernel: AttentionKernel,
    features: str,
    queries: int,
    dims: tuple[int, int],
    dtype: str,
    causal: Causal,
    seqlen_k: int,
) -> AttentionShape:
    return AttentionShape(
        batch=2,
        num_heads=4,
        num_heads_kv=2,
        seqlen_q=queries,
        seqlen_k=seqlen_k,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype if dtype in kernel.dtypes else FP8,
        causal=causal,
        direction=kernel.direction,
        features=Features.parse(features),
    )


def every_case(dims: Sequence[int] = DIMS, dtypes: Sequence[str] = ("bfloat16",)) -> Iterator[Case]:
    """Every kernel, architecture, pair of head dimensions and data type that the rules admit."""
    for kernel, cc, dtype in itertools.product(KERNELS.values(), ARCHITECTURES, dtypes):
        for pair in itertools.product(dims, dims):
            case = default_case(kernel, cc, pair, dtype)
            if case is not None and (case.shape.dtype == dtype or dtype == dtypes[0]):
                yield case


def candidate_cases(configs: int, every: int = 1) -> Iterator[Case]:
    """Of every kernel with descriptors, architecture and pair of widths, or of one in `every` of these, this many
    configs that a search might try."""
    dice = random.Random(SEED)
    for place in itertools.islice(_drawn_places(dice), 0, None, every):
        feasible = SearchSpace.build(place.shape, limits_for(place.cc), (place.kernel,)).feasible
        yield from (
            Case(config, place.shape, place.cc) for config in dice.sample(feasible, min(configs, len(feasible)))
        )


def _drawn_places(dice: random.Random) -> Iterator[Place]:
    """Yield a drawn shape of every kernel with descriptors, architecture and pair of widths that its rules admit."""
    for name, cc, dims in itertools.product(DESCRIBED, ARCHITECTURES, itertools.product(TILES, TILES)):
        causal, keys = dice.choice((Causal.NONE, Causal.UPPER_LEFT)), dice.choice((512, 500))
        shape = shape_for(get_kernel(name), cc, dims, dice.choice(("bfloat16", "float16")), causal, keys)
        if shape is not None:
            yield Place(get_kernel(name), shape, cc)


@cache
def narrow_cases() -> tuple[Case, ...]:
    """Return a case of every kernel of wgmma at the pairs of `NARROW_VALUES`."""
    return tuple(
        case
        for kernel, pair in itertools.product(KERNELS.values(), NARROW_VALUES)
        if (case := default_case(kernel, (9, 0), pair)) is not None and not kernel.historical
    )


@cache
def covering_cases() -> tuple[Case, ...]:
    """Return cases which, with `narrow_cases`, meet every pair of choices that any case has: kernel and width, width
    and architecture, width and width, data type and mask and so on."""
    return tuple(place.default() for place in _covering(_all_choices(), [case.place for case in narrow_cases()]))


def _all_choices() -> list[Place]:
    """Return a place of every combination of the choices that are to meet in pairs."""
    found = []
    for kernel, cc, pair in itertools.product(KERNELS.values(), ARCHITECTURES, itertools.product(WIDTHS, WIDTHS)):
        for dtype, causal, keys in itertools.product(
            ("bfloat16", "float16", "float32"), (Causal.NONE, Causal.UPPER_LEFT), (512, 500)
        ):
            shape = shape_for(kernel, cc, pair, dtype, causal, keys)
            if shape is not None:
                found.append(Place(kernel, shape, cc))
    return list(dict.fromkeys(found))


def _covering(places: Sequence[Place], already: Sequence[Place]) -> Iterator[Place]:
    """Greedily, the next place that has the most pairs of choices which no earlier one had; of equals the narrowest.

    A place never has more of them than when it was last counted, so that most need no second count.
    """
    wanted = set().union(*map(_pairs, places))
    wanted -= set().union(*map(_pairs, already), set())
    waiting = [(-len(_pairs(place) & wanted), _columns(place), number) for number, place in enumerate(places)]
    heapq.heapify(waiting)
    while wanted:
        counted, columns, number = heapq.heappop(waiting)
        new = _pairs(places[number]) & wanted
        if len(new) < -counted:
            heapq.heappush(waiting, (-len(new), columns, number))
            continue
        wanted -= new
        yield places[number]


def _columns(place: Place) -> int:
    """Return what the time of a compile grows with."""
    return place.shape.head_dim * place.shape.head_dim_v * (3 if place.shape.dtype == "float32" else 1)


@cache
def _pairs(place: Place) -> frozenset[tuple[object, object]]:
    shape = place.shape
    choices = (
        ("kernel", place.kernel.name),
        ("cc", place.cc),
        ("width", shape.head_dim),
        ("width_v", shape.head_dim_v),
        ("dtype", shape.dtype),
        ("causal", shape.causal is Causal.NONE),
        ("ragged", shape.seqlen_k % 64 == 0),
    )
    return frozenset(itertools.combinations(choices, 2))
