"""How a case may end."""

from enum import StrEnum


class Verdict(StrEnum):
    """What came of a case."""

    RIGHT = "right"
    WRONG = "wrong"
    INHERITED = "inherited"  # wrong, but PyTorch computed it, whose default gives the same to the bit
    RAISED = "raised"  # ours raises where PyTorch computes
    ACCEPTED = "accepted"  # ours computes where PyTorch raises
    REFUSED = "refused"  # both raise, ours an error of PyTorch's class
    OTHER_ERROR = "other_error"  # both raise, ours an error of another class
    OUT_OF_MEMORY = "out_of_memory"
    DEAD = "dead"  # the process or its CUDA context ended
    PYTORCH_DEAD = "pytorch_dead"  # ours raises, and PyTorch's call ends the process
    HUNG = "hung"  # no answer in time
    BROKEN = "broken"  # the check itself raised


FAILURES = frozenset((Verdict.WRONG, Verdict.RAISED, Verdict.DEAD, Verdict.HUNG, Verdict.BROKEN))
DIFFERENCES = frozenset((Verdict.ACCEPTED, Verdict.OTHER_ERROR))
"""Answers to wrong calls that differ from PyTorch's."""
