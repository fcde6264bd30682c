"""Texts for the terms of the cost model: their meaning, and a remedy, by direction and kernel.

    terms_of(shape)["l2"]                          # keys and values from L2
    lifts_of(kernel, config, shape, limits)["l2"]  # names no parameter that this config cannot change so

An advice is given only where the kernel has a choice that follows it: none names `schedule` to a kernel without one, or
a taller block to a config that has the tallest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.base.loops import DecodeLoops
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction

TERMS = {
    "tensor": "matrix products",
    "exp": "exponentials of the softmax",
    "arithmetic": "other arithmetic of the softmax",
    "spill": "registers spilled to local memory",
    "shared": "reads and writes of shared memory",
    "l2": "keys and values from L2",
    "hbm": "device memory",
    "latency": "synchronisation and latency",
    "edge": "launches, prologues and epilogues of blocks",
    "tail": "an uneven last wave",
    "beside": "launches before and after that only move bytes",
}
"""Of a forward."""

BACKWARD_TERMS = {
    "exp": "exponentials of the probabilities",
    "arithmetic": "other arithmetic of the probabilities",
    "l2": "queries and gradients from L2, and sums of dq there",
}
"""Where a backward, whose blocks own keys and walk along the queries, differs."""


class Trend(Enum):
    """Which other choices of a parameter an advice is about."""

    LARGER = "larger"
    SMALLER = "smaller"
    ANOTHER = "another"


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence of what would lift a term, for configs whose kernel has a choice that changes the parameter so."""

    text: str
    parameter: str
    change: Trend


MORE_BLOCKS = "With more resident blocks, other work hides it: see what the occupancy needs."

FACTS = {
    "tensor": "It is the work itself: only tiles with fewer masked or padded scores do less of it.",
    "exp": "There is one per score: block sizes do not change their number.",
    "arithmetic": "It grows with the number of scores: block sizes do not change it.",
    "spill": "A thread holds more than its registers.",
    "shared": "Bank conflicts, where they are listed, are of the compiler's layouts, which no parameter changes.",
    "l2": "Every block reads all that it walks along.",
    "hbm": "No block sizes lower what must be read at least once.",
    "latency": "Waiting is hidden by other work that could run meanwhile.",
    "edge": "Every block begins and ends once.",
    "tail": "Blocks that end together leave no multiprocessor idle.",
    "beside": "These launches move the same bytes whatever the blocks are.",
}
"""What holds of each term for every kernel."""

BACKWARD_FACTS = {
    "tensor": "It is the work itself: five products in one pass, seven in two, and only tiles with fewer masked or "
    "padded scores do less of it.",
    "exp": "One pass computes each probability once, two compute it twice.",
    "hbm": "No block sizes lower what must be read at least once; one pass adds its sums of dq, two read the inputs "
    "twice.",
}

DECODE_FACTS = {
    "exp": "There is one per score, those of rows without a query included.",
    "tensor": "Rows of a block that no query fills are multiplied like others.",
    "hbm": "Every key must be read once. Fewer key heads, a smaller data type or a window read less.",
}

ADVICE = {
    "exp": (Advice("A larger `schedule` computes them while products run.", "schedule", Trend.LARGER),),
    "arithmetic": (
        Advice("A larger `schedule` overlaps it with products; 2 has no running maximum.", "schedule", Trend.LARGER),
    ),
    "spill": (
        Advice("More warps (`num_warps`) leave more registers for each row.", "num_warps", Trend.LARGER),
        Advice("A smaller `block_m` needs fewer registers.", "block_m", Trend.SMALLER),
        Advice("A smaller `block_n` needs fewer registers.", "block_n", Trend.SMALLER),
    ),
    "shared": (
        Advice("A larger `block_m` uses every operand that is read for more products.", "block_m", Trend.LARGER),
    ),
    "l2": (Advice("A larger `block_m` uses every key more often.", "block_m", Trend.LARGER),),
    "latency": (
        Advice("More stages (`num_stages`) request tiles earlier.", "num_stages", Trend.LARGER),
        Advice("More warps (`num_warps`) fill it.", "num_warps", Trend.LARGER),
    ),
    "edge": (Advice("A larger `block_m` makes fewer blocks, if they still fill the GPU.", "block_m", Trend.LARGER),),
    "tail": (
        Advice("A smaller `block_m` makes more, shorter blocks, which end more evenly.", "block_m", Trend.SMALLER),
    ),
}
"""For forwards, by term."""

BACKWARD_ADVICE: dict[str, tuple[Advice, ...]] = {
    "exp": (),
    "arithmetic": (),
    "shared": (
        Advice("A larger `block_n` uses every operand that is read for more products.", "block_n", Trend.LARGER),
    ),
    "l2": (
        Advice(
            "A larger `block_n` uses every query and its gradient more often.",
            "block_n",
            Trend.LARGER,
        ),
    ),
    "edge": (Advice("A larger `block_n` makes fewer blocks, if they still fill the GPU.", "block_n", Trend.LARGER),),
    "tail": (
        Advice("A smaller `block_n` makes more, shorter blocks, which end more evenly.", "block_n", Trend.SMALLER),
    ),
}
"""Where a backward differs."""

DECODE_ADVICE = {
    "exp": (Advice("A smaller `block_m` computes fewer of these.", "block_m", Trend.SMALLER),),
    "tensor": (Advice("A smaller `block_m` multiplies fewer of them.", "block_m", Trend.SMALLER),),
    "arithmetic": (
        Advice("More `splits` spread it over multiprocessors that idle, where some do.", "splits", Trend.LARGER),
    ),
    "l2": (Advice("A `block_m` that holds all rows of a group reads its keys once.", "block_m", Trend.LARGER),),
    "hbm": (),
    "latency": (
        Advice("More `splits` keep more reads in flight.", "splits", Trend.LARGER),
        Advice("More stages (`num_stages`) request tiles earlier.", "num_stages", Trend.LARGER),
    ),
    "edge": (
        Advice(
            "Fewer `splits` have fewer prologues and partial results, if the blocks still fill the GPU.",
            "splits",
            Trend.SMALLER,
        ),
    ),
    "tail": (Advice("Other `splits` change the number of waves.", "splits", Trend.ANOTHER),),
}
"""Where split-KV decoding differs."""

ROUND_TRIP_FACTS = {
    "l2": "With every tile of keys the output makes a round trip.",
    "hbm": "With every tile of keys the output makes a round trip.",
    "edge": "There is one block per head, whatever its tiles.",
    "tail": "There is one block per head, whatever its tiles: few heads leave multiprocessors idle.",
}

FEWER_TRIPS = (Advice("A larger `block_n` makes fewer of these.", "block_n", Trend.LARGER),)
ROUND_TRIP_ADVICE: dict[str, tuple[Advice, ...]] = {"l2": FEWER_TRIPS, "hbm": FEWER_TRIPS, "edge": (), "tail": ()}
"""Where keys stay and queries and outputs travel, as in FlashAttention v1."""

HIDDEN_BY_BLOCKS = ("exp", "arithmetic", "latency")
"""Terms that other resident blocks hide."""


def terms_of(shape: AttentionShape) -> Mapping[str, str]:
    """Return the terms of the cost model in words."""
    return TERMS | BACKWARD_TERMS if shape.direction is Direction.BACKWARD else TERMS


def lifts_of(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits
) -> dict[str, str]:
    """Return what would make each term smaller, by the choices that the kernel has."""
    facts, advice = _texts(kernel, config, shape)
    # a block whose warps copy for others is meant to have its multiprocessor for itself
    shares = kernel.softmax_cost(config).copying_warps == 0
    return {
        term: " ".join(
            (
                fact,
                *(one.text for one in advice.get(term, ()) if _can_follow(one, kernel, config, shape, limits)),
                *([MORE_BLOCKS] if shares and term in HIDDEN_BY_BLOCKS else []),
            )
        )
        for term, fact in facts.items()
    }


def _texts(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape
) -> tuple[Mapping[str, str], Mapping[str, tuple[Advice, ...]]]:
    if shape.direction is Direction.BACKWARD:
        return FACTS | BACKWARD_FACTS, ADVICE | BACKWARD_ADVICE
    if isinstance(kernel.loops, DecodeLoops):
        return FACTS | DECODE_FACTS, ADVICE | DECODE_ADVICE
    if "splits" in kernel.parameters:
        return FACTS, ADVICE | {"tail": (*ADVICE["tail"], *DECODE_ADVICE["tail"])}
    if kernel.softmax_cost(config).round_trip:
        return FACTS | ROUND_TRIP_FACTS, ADVICE | ROUND_TRIP_ADVICE
    return FACTS, ADVICE


def _can_follow(
    advice: Advice, kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits
) -> bool:
    """Return whether the config with another choice of the parameter, as advised, is one that can run."""
    return any(not kernel.omissions(other, shape, limits) for other in _changed(advice, kernel, config))


def _changed(advice: Advice, kernel: AttentionKernel, config: KernelConfig) -> Iterator[KernelConfig]:
    name, own = advice.parameter, config.parameters
    for choice in kernel.parameters.get(name, ()):
        larger = choice > own[name]
        if choice != own[name] and advice.change in (Trend.ANOTHER, Trend.LARGER if larger else Trend.SMALLER):
            yield KernelConfig.of(config.kernel, own | {name: choice})
