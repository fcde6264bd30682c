"""Two kernels that do one thing as fast as a device can: read what L2 holds, and compute exponentials."""

import triton
import triton.language as tl


@triton.jit
def read_kernel(Words, Sums, num_blocks, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up STEPS blocks of Words [num_blocks, BLOCK], past L1, from a place of this program's own on, round and
    round: Sums [programs, BLOCK]. Neighbours read other blocks, so that no request is answered for two of them."""
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    place = program * 97 % num_blocks
    for _ in range(STEPS):
        total += tl.load(Words + place * BLOCK + lanes, cache_modifier=".cg")
        place = tl.where(place + 1 < num_blocks, place + 1, 0)
    tl.store(Sums + program * BLOCK + lanes, total)


@triton.jit
def exp_kernel(Values, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace every x of Values [programs, BLOCK] by 2^-x, STEPS times."""
    places = Values + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(places)
    for _ in range(STEPS):
        x = tl.exp2(-x)
    tl.store(places, x)
