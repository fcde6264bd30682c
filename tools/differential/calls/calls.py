"""The calls of a case: ours, PyTorch's, and the problem that both are to solve."""

from tools.differential.calls.flash_calls import cache_calls, flash_calls
from tools.differential.calls.packed_calls import packed_calls
from tools.differential.calls.plain_calls import merge_calls, plain_calls, transformers_calls
from tools.differential.calls.problems import Calls, Subject
from tools.differential.cases.case import Case
from tools.differential.cases.enums import DENSE, PACKED_SEQUENCES, Entry
from tools.differential.cases.tensors import Inputs

MAKERS = {
    Entry.SDPA: plain_calls,
    Entry.TRANSFORMERS: transformers_calls,
    Entry.KVCACHE: cache_calls,
    Entry.MERGE: merge_calls,
    **dict.fromkeys(DENSE, flash_calls),
    **dict.fromkeys(PACKED_SEQUENCES, packed_calls),
}


def calls_of(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    """The calls of a case with these inputs."""
    return MAKERS[case.kind.entry](case, inputs, subject)
