"""What each term of the cost model stands for, and what would lift it, by what is computed."""

from collections.abc import Mapping

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
    "latency": "waiting for no unit: barriers, reductions, first results",
    "edge": "launches, prologues and epilogues of blocks",
    "tail": "an uneven last wave",
    "beside": "launches before and after that only move bytes",
}
"""Of a forward."""

LIFTS = {
    "tensor": "it is the work itself: only tiles with fewer masked or padded scores do less of it.",
    "exp": "their number is the number of scores, whatever the blocks; what helps is to compute them while products "
    "run, by more resident blocks or a `schedule` that runs ahead.",
    "arithmetic": "a schedule without a running maximum (`schedule` 2) has the least of it; more resident blocks hide "
    "it behind products.",
    "spill": "smaller blocks or more warps leave more registers for each row.",
    "shared": "taller blocks use every operand that they read for more products; the bank conflicts that are listed "
    "are of the compiler's layouts, which no parameter changes.",
    "l2": "a larger block_m uses every key more often; block_n does not matter to it.",
    "hbm": "no block sizes reduce what must be read at least once; splitting the keys over more blocks would keep more "
    "reads in flight.",
    "latency": "more resident blocks or warps fill it: see what the occupancy needs.",
    "edge": "fewer, longer blocks have fewer of them: a larger block_m, if the grid still fills the GPU.",
    "tail": "another block_m changes the number of waves; many small blocks end more evenly.",
    "beside": "no block sizes do: these launches move the same bytes whatever they are.",
}
"""What would make each term of a forward smaller."""

BACKWARD_TERMS = {
    "exp": "exponentials of the probabilities",
    "arithmetic": "other arithmetic of the probabilities",
    "l2": "queries and gradients from L2, and sums of dq there",
}
"""Where a backward, whose blocks own keys and walk along the queries, differs."""

BACKWARD_LIFTS = {
    "tensor": "it is the work itself: five products in one pass, seven in two, and only tiles with fewer masked or "
    "padded scores do less of it.",
    "exp": "one pass computes each probability once, two compute it twice; what helps is to compute them during "
    "products, by more resident blocks.",
    "arithmetic": "more resident blocks hide it behind products.",
    "l2": "a larger block_n uses every query and its gradient more often and adds to dq less often; block_m does not "
    "matter to it.",
    "hbm": "no block sizes reduce what must be read at least once; one pass adds its sums of dq, two read the inputs "
    "twice.",
    "edge": "fewer, longer blocks have fewer of them: a larger block_n, if the grid still fills the GPU.",
    "tail": "another block_n changes the number of waves; many small blocks end more evenly.",
}

DECODE_LIFTS = {
    "exp": "their number is the number of scores; a block_m that is nearer to the rows of a group computes fewer for "
    "rows that do not exist.",
    "tensor": "a block_m that is nearer to the rows of a group multiplies fewer rows that do not exist.",
    "arithmetic": "more `splits` spread it over more multiprocessors, while some of them idle.",
    "l2": "a block_m that holds all rows of a group reads its keys once.",
    "hbm": "nothing in the kernel does: every key must be read once. Fewer key heads, a smaller data type or a window "
    "read less.",
    "latency": "more `splits`, more stages or more resident blocks keep more reads in flight.",
    "edge": "fewer `splits` have fewer prologues and partial results, if the grid still fills the GPU.",
    "tail": "another number of `splits` changes the number of waves.",
}
"""Where split-KV decoding differs."""


def terms_of(shape: AttentionShape) -> Mapping[str, str]:
    """The terms of the cost model in words."""
    return TERMS | BACKWARD_TERMS if shape.direction is Direction.BACKWARD else TERMS


def lifts_of(shape: AttentionShape, config: KernelConfig) -> Mapping[str, str]:
    """What would make each term smaller."""
    if shape.direction is Direction.BACKWARD:
        return LIFTS | BACKWARD_LIFTS
    return LIFTS | DECODE_LIFTS if "splits" in config.parameters else LIFTS
