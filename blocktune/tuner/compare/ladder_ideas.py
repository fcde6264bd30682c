"""The steps of the two ladders, first to last, from standard attention to the fastest kernel.

A kernel names the steps that it may stand for (`AttentionKernel.ladder_steps`), but for those of PyTorch.
"""

from blocktune.kernels.values.shape import Direction

STANDARD, CHUNKED, EFFICIENT, V1, PAPER, V2, PADDED, TRANSPOSED, TUNED, HOPPER = (
    "standard",
    "chunked",
    "efficient",
    "v1",
    "paper",
    "v2",
    "padded",
    "transposed",
    "tuned",
    "hopper",
)
TWO_PASSES, ONE_PASS = "two_passes", "one_pass"

IDEAS = {
    Direction.FORWARD: {
        STANDARD: "three operations of PyTorch, with all scores and probabilities in device memory between them",
        CHUNKED: "PyTorch's operations on a piece of the queries and keys at a time, whose results are merged",
        EFFICIENT: "PyTorch's memory-efficient kernel: the chunks of a tile of queries in one launch, scores on the "
        "chip",
        V1: "scores stay on the chip: keys outside, queries inside, one block per head; the output makes the round "
        "trip",
        PAPER: "v1 with the blocks that its paper prescribes: as many keys and queries as fill the shared memory",
        V2: "loops exchanged: one block for each tile of queries, which keeps its output and divides it once, at the "
        "end",
        PADDED: "v2 with the head dimension padded to the next power of two, against bank conflicts",
        TRANSPOSED: "v2 over keys that a kernel of its own transposed in advance; that kernel is timed too",
        TUNED: "v2's algorithm in ordinary Triton with the best blocks, stages and schedule known here",
        HOPPER: "warps that copy while other warps compute, with the instructions of Hopper",
    },
    Direction.BACKWARD: {
        STANDARD: "autograd of PyTorch's operations: probabilities that the forward kept, their gradients and those of "
        "the scores are matrices in device memory",
        EFFICIENT: "PyTorch's memory-efficient kernel, which computes scores again instead of keeping them",
        TWO_PASSES: "scores are computed again on the chip, twice: one pass owns keys and sums dK and dV, one owns "
        "queries and sums dQ",
        ONE_PASS: "scores are computed again once: the pass over keys also adds its part of dQ to sums in device "
        "memory",
        TUNED: "one or two passes in ordinary Triton with the best blocks and stages known here",
        HOPPER: "one pass: warps that copy, warps that compute with the instructions of Hopper, and a copy engine that "
        "adds dQ",
    },
}
"""What each step is, first to last, by direction."""

PYTORCH = (STANDARD, CHUNKED, EFFICIENT)
"""The steps that PyTorch computes. No model knows the code of the last two, so that they are only measured."""

PLAIN = {Direction.FORWARD: (V1, V2, PADDED, TRANSPOSED), Direction.BACKWARD: (TWO_PASSES, ONE_PASS)}
"""The steps whose blocks are not tuned, by direction."""
