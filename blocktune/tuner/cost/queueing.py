"""How far work of several kinds overlaps when a few independent strands of it share a multiprocessor.

A warpgroup alternates between units: it waits for its matrix products, then computes exponentials, and so on. Others
may use what it leaves idle, and how well that works out depends on how many others there are: the question of a closed
queueing network, which mean value analysis answers (Reiser and Lavenberg, JACM 27(2), 1980). One strand overlaps
nothing and takes the sum of its demands; with many, the busiest unit alone decides.
"""

import math
from collections.abc import Sequence

QUEUEING = 0.5
"""How long a strand waits for a unit that another one uses, as a share of what mean value analysis says: it takes
service times as random, and those here hardly vary, which halves the waiting (Pollaczek-Khinchine)."""


def iteration_cycles(
    tensor: float, others: Sequence[float], delay: float, strands: float, *, products_overlap: bool = False
) -> float:
    """Return the cycles between the ends of two iterations on one multiprocessor, whichever strands they are of.

    Args:
        tensor: cycles of the tensor cores that an iteration needs.
        others: cycles of every other unit that it needs.
        delay: cycles of an iteration in which the strand waits for no unit.
        strands: how many there are, at least 1; between two whole numbers their results are interpolated.
        products_overlap: a strand keeps one of its two matrix products running while it uses the other units.
    """
    waiting_tensor, waiting_others, cycles = 0.0, [0.0] * len(others), 0.0
    for present in range(1, math.ceil(strands) + 1):
        in_tensor = tensor * (1 + waiting_tensor)
        in_others = [demand * (1 + waiting) for demand, waiting in zip(others, waiting_others, strict=True)]
        if products_overlap:
            length = in_tensor / 2 + max(in_tensor / 2, sum(in_others)) + delay
        else:
            length = in_tensor + sum(in_others) + delay
        fewer, cycles = cycles, max(length / present, tensor, *others)
        waiting_tensor = QUEUEING * in_tensor / cycles
        waiting_others = [QUEUEING * time / cycles for time in in_others]
    part = strands % 1
    return cycles * part + fewer * (1 - part) if part else cycles
