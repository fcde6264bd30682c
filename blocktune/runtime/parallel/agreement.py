"""All ranks call alike: each sends the others a short description of a call that is new to it, before anything else.

A call that was described once costs nothing more. Descriptions travel as JSON in tensors: nothing that a rank sends is
executed by another.
"""

import hashlib
import json
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from blocktune.kernels.values.errors import RankError, UsageError
from blocktune.runtime.parallel.messages import Messages, ProcessGroup
from blocktune.runtime.parallel.ranks import Ranks

DESCRIPTION_BYTES = 4096
"""What a rank sends, in JSON."""

MAX_PROBLEM = 500
"""Characters of a problem, each of which JSON may spell with 6 bytes."""

DESCRIPTION_TAG = 7
"""Keeps descriptions apart from keys: a rank with a new call may meet one that goes on with a known one."""

SILENCE_TAG = 8
"""Of questions whether a rank still answers."""

FOLLOWING = ("layout", "cu_seqlens", "join")
"""What differs of itself where lengths differ."""

MOST_KNOWN = 4096
_known: WeakKeyDictionary[ProcessGroup, set[str]] = WeakKeyDictionary()
"""Descriptions that all ranks of a group agreed on."""

_connected: WeakSet[ProcessGroup] = WeakSet()
"""Groups whose ranks have met on their GPUs."""

CPU = torch.device("cpu")

Description = dict[str, Any]


def agree(
    ranks: Ranks, description: Description, problem: UsageError | None = None, *, device: torch.device = CPU
) -> None:
    """Compare what all ranks are about to do.

    Args:
        ranks: who calls.
        description: what must be equal on all ranks, as JSON values.
        problem: why this rank cannot make its call.
        device: where the tensors are that travel then.

    Raises:
        UsageError: a rank has a problem, or descriptions differ. All ranks raise it.
        RankError: a rank did not describe its call within the group's timeout.
    """
    key = json.dumps(description, sort_keys=True)
    if problem is None and all(key in _known.get(group, ()) for group in ranks.groups):
        return
    text = None if problem is None else str(problem)
    answer: Description = {"problem": text, "call": description, "ranks": [dist.get_rank()]}
    try:
        for group in ranks.groups:
            answer = _combine(_gather_descriptions(answer, group))
    except RankError as error:
        if problem is not None:
            raise problem from error
        raise
    if answer["problem"] is not None:
        raise UsageError(answer["problem"])
    for group in ranks.groups:
        _connect(group, device)
        known = _known.setdefault(group, set())
        if len(known) >= MOST_KNOWN:
            known.clear()
        known.add(key)


def _connect(group: ProcessGroup, device: torch.device) -> None:
    """Let all ranks of a group meet on their GPUs once: NCCL connects them then, which needs all, and what travels
    later may concern some of them only."""
    if device.type == "cuda" and group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


def _combine(answers: Sequence[Description]) -> Description:
    """Return what the ranks of a group have in common, or their problem."""
    first, problem = answers[0], None
    problems = [(answer["ranks"], answer["problem"]) for answer in answers if answer["problem"] is not None]
    names = [name for name in first["call"] if any(one["call"].get(name) != first["call"][name] for one in answers)]
    if problems:
        problem = _by_rank(problems)
    elif names:
        problem = _difference(answers, _telling(names))
    return first | {"problem": problem, "ranks": [rank for answer in answers for rank in answer["ranks"]]}


def _telling(names: list[str]) -> list[str]:
    """Return the names of what differs, without what follows from another length."""
    return [name for name in names if name not in FOLLOWING] if "seqlen" in names else names


def _difference(answers: Sequence[Description], names: list[str]) -> str:
    """Return how calls differ, and what to do about it."""
    told = [(one["ranks"], ", ".join(f"{name}={one['call'].get(name)}" for name in names)) for one in answers]
    way_out = "Pass the same arguments on all ranks."
    if "seqlen" in names or "layout" in names:
        way_out = "Where parts have different lengths, pass the same SequenceLayout as `layout` on all ranks."
    return f"All ranks must make the same call with their parts of one sequence, but got {_by_rank(told)}. {way_out}"


def _by_rank(texts: Sequence[tuple[list[int], str]]) -> str:
    """Return each text once, after the ranks that it is of."""
    ranks: dict[str, list[int]] = {}
    for own, text in texts:
        ranks.setdefault(text, []).extend(own)
    return "; ".join(
        f"rank{'s' * (len(own) > 1)} {', '.join(map(str, sorted(own)))}: {text}" for text, own in ranks.items()
    )


def _gather_descriptions(answer: Description, group: ProcessGroup) -> list[Description]:
    """Return what all ranks of a group answer, in their order.

    Raises:
        RankError: one does not.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    answer = answer | {"problem": answer["problem"] and answer["problem"][:MAX_PROBLEM]}
    own = torch.frombuffer(bytearray(json.dumps(answer).encode().ljust(DESCRIPTION_BYTES)), dtype=torch.uint8)
    device = tensor_device(group)
    answers = [own.to(device) if number == rank else torch.empty_like(own, device=device) for number in range(size)]
    others = [number for number in range(size) if number != rank]
    sent, received = [(peer, answers[rank]) for peer in others], [(peer, answers[peer]) for peer in others]
    Messages(group, sent, received, "the description of its call", DESCRIPTION_TAG).wait()
    return [json.loads(bytes(each.tolist())) for each in answers]


def silent_ranks(group: ProcessGroup) -> list[int]:
    """Return the ranks that do not answer by way of their hosts within the group's timeout, once something has failed
    that names none; an empty list where a group has no such way."""
    if tensor_device(group) != CPU:
        return []
    others = [peer for peer in range(dist.get_world_size(group)) if peer != dist.get_rank(group)]
    questions = [(dist.get_global_rank(group, peer), _question_to(peer, group)) for peer in others]
    return [rank for rank, messages in questions if messages is None or not _has_answered(messages)]


def _question_to(peer: int, group: ProcessGroup) -> Messages | None:
    """Return a question to a rank that is under way with its answer, None where the rank cannot be reached."""
    with suppress(RankError):
        asked, answered = (torch.zeros(1, device=CPU) for _ in range(2))
        return Messages(group, [(peer, asked)], [(peer, answered)], "a sign of life", SILENCE_TAG)
    return None


def _has_answered(messages: Messages) -> bool:
    """Wait for an answer, and return whether it came."""
    try:
        messages.wait()
    except RankError:
        return False
    return True


def tensor_device(group: ProcessGroup) -> torch.device:
    """Return where tensors may be that travel in a group: on the CPU where a backend takes them, since an error there
    names the rank, or on the current GPU."""
    takes_cpu = "cpu:" in str(dist.get_backend_config(group))
    return torch.device("cpu") if takes_cpu else torch.device("cuda", torch.cuda.current_device())


@lru_cache(maxsize=256)
def digest(value: Hashable) -> str:
    """Return a short text that stands for a value in descriptions."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
