"""What ranks that share attention do besides being right: they refuse, end together, and decode."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from blocktune import (
    SequenceLayout,
    context_parallel_attention,
    context_parallel_decode,
    flash_attn_with_kvcache,
    join_sequence,
    split_sequence,
)
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.autotuned.frozen import known_rows
from blocktune.runtime.parallel import decode, measured_schedule, messages
from blocktune.runtime.parallel.plan.cost import fastest, machine_of
from blocktune.runtime.parallel.plan.schedule import Schedule
from blocktune.runtime.parallel.ranks import Ranks
from blocktune.runtime.parallel.request import request_of
from blocktune.tuner.drop_in import tune_schedule

Answer = dict[str, Any]
LENGTH = 16


def part(length: int = LENGTH, *, heads: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a rank."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, count, length, 8, generator=generator) for count in (heads, 2, 2))
    return q, k, v


def refusal(call: Callable[[], Any]) -> Answer:
    """Return the error of a call, and how long it took."""
    begin = time.monotonic()
    try:
        call()
    except BlocktuneError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": None}


def refuses() -> Answer:
    """Call wrongly in every way, on one rank or on all; nothing is sent, and the next call works."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == size - 1
    wrong: dict[str, Callable[[], Any]] = {
        "length": lambda: context_parallel_attention(*part(LENGTH + last)),
        "layout": lambda: context_parallel_attention(*part(), layout=SequenceLayout.of_lengths([LENGTH + 1] * size)),
        "other layout": lambda: context_parallel_attention(*part(), layout="zigzag" if first else "contiguous"),
        "heads": lambda: context_parallel_attention(*part(heads=3 if last else 4)),
        "dtype": lambda: context_parallel_attention(*(one.to(torch.float16 if last else one.dtype) for one in part())),
        "scale": lambda: context_parallel_attention(*part(), scale=0.5 if first else None),
        "dimensions": lambda: context_parallel_attention(*(one[0] for one in part())),
        "no tensor": lambda: context_parallel_attention("x" if first else part()[0], *part()[1:]),  # type: ignore[arg-type]
        "no numbers": lambda: context_parallel_attention(*part(), cu_seqlens="0,9"),
        "no layout": lambda: context_parallel_attention(*part(), layout=[LENGTH] * size),  # type: ignore[arg-type]
        "cu_seqlens": lambda: context_parallel_attention(*part(), cu_seqlens=(0, 9, 8, LENGTH * size)),
        "end": lambda: context_parallel_attention(
            *part(), cu_seqlens=(0, LENGTH * size + 1), layout=SequenceLayout.zigzag(LENGTH * size, size)
        ),
        "schedule": lambda: context_parallel_attention(*part(), schedule="star"),
        "ulysses": lambda: context_parallel_attention(*part(heads=2), schedule="ulysses"),
        "gradient": lambda: context_parallel_attention(*(one.requires_grad_(first) for one in part())),
        "join": lambda: join_sequence(part(LENGTH + first)[0], dim=2),
        "decode": lambda: context_parallel_decode(*(one.transpose(1, 2)[:, : 4 + first] for one in part())),
        "no cache": lambda: context_parallel_decode(part()[0], "x" if last else part()[1], part()[2]),  # type: ignore[arg-type]
    }
    found: Answer = {name: refusal(call) for name, call in wrong.items()}
    q, k, v = part()
    found["works after"] = list(context_parallel_attention(q, k, v).shape)
    return found


def sends_descriptions_once() -> Answer:
    """Count the descriptions that travel in repeated calls."""
    sent: list[str] = []
    begin = messages.Messages.__init__

    def counted(own: Any, group: Any, out: Any, into: Any, content: str, tag: int = 0) -> None:
        sent.append(content)
        begin(own, group, out, into, content, tag)

    messages.Messages.__init__ = counted  # type: ignore[method-assign]
    found = []
    for length in (LENGTH, LENGTH, LENGTH + 1, LENGTH):
        sent.clear()
        context_parallel_attention(*part(length), is_causal=True, schedule="ring")
        found.append(sent.count("the description of its call"))
    return {"descriptions": found}


def attends() -> object:
    """Make one call of attention over all ranks."""
    return context_parallel_attention(*part(seed=dist.get_rank()), schedule="ring")


def reads_cache() -> object:
    """Make one call of decoding over all ranks."""
    return context_parallel_decode(*(one.transpose(1, 2) for one in part(seed=dist.get_rank())))


def ends_with_a_dead_rank(call: Callable[[], object]) -> Answer:
    """Let the last rank die in the middle of its second call."""
    call()
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(7)
    answer = refusal(call)
    time.sleep(5)  # ended at once, it would be one more dead rank for those that are later
    return answer


def ends_with_another_size() -> Answer:
    """Let one rank come with another length where all others go on with a call that they know."""
    context_parallel_attention(*part(), schedule="ring")
    own = LENGTH + 2 if dist.get_rank() == 1 else LENGTH
    return refusal(lambda: context_parallel_attention(*part(own), schedule="ring"))


def ends_with_an_absent_rank(call: Callable[[], object]) -> Answer:
    """Let one rank never call while it lives."""
    if dist.get_rank() == 1:
        time.sleep(20)
        return {"error": "absent"}
    return refusal(call)


def ends_decoding_with_an_absent_rank() -> Answer:
    """Let one rank stay away from a call that all ranks know."""
    reads_cache()
    return ends_with_an_absent_rank(reads_cache)


def ends_a_failed_gather_with_an_absent_rank() -> Answer:
    """Let one rank stay away where a gather fails as one of NCCL does, which names no rank."""

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("the gather timed out\nin a watchdog")

    decode._gather = fails
    return ends_with_an_absent_rank(lambda: decode._gather_partials(torch.zeros(2), dist.group.WORLD))


def splits_and_joins() -> Answer:
    """Split sequences of several lengths and dimensions and join them again."""
    size, same = dist.get_world_size(), []
    for length in (0, 1, 7, 16, 41):
        whole = torch.arange(length * 6).view(2, length, 3)
        for layout in (SequenceLayout.zigzag(length, size), SequenceLayout.contiguous(length, size)):
            own = split_sequence(whole, dim=1, layout=layout)
            same.append(torch.equal(join_sequence(own, dim=1, layout=layout), whole))
    whole = torch.randn(4 * size, 5, generator=torch.Generator().manual_seed(0))
    same.append(torch.equal(join_sequence(split_sequence(whole, dim=0), dim=0), whole))
    return {"same": same}


def decodes(group: Any = None) -> Answer:
    """Decode over caches of which each rank has other rows, the first one none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 4, 8, generator=generator)
    caches = [torch.randn(3, 40, 2, 8, generator=generator) for _ in range(2)]
    sinks = torch.randn(4, generator=generator)
    lengths = torch.randint(0, 9, (size, 3), generator=generator, dtype=torch.int32)
    lengths[0] = 0
    places = torch.nn.functional.pad(lengths.cumsum(0), (0, 0, 1, 0))
    rows = [torch.stack([one[b, places[rank, b] :][:8] for b in range(3)]) for one in caches]
    rows = [one[:, :0] for one in rows] if rank == 0 else rows
    filled = None if rank == 0 else lengths[rank]
    options: dict[str, Any] = {"s_aux": sinks, "softcap": 3.0}
    out, lse = context_parallel_decode(q, *rows, cache_seqlens=filled, group=group, return_lse=True, **options)
    total = lengths.sum(0, dtype=torch.int32)
    right, right_lse = flash_attn_with_kvcache(q, *caches, cache_seqlens=total, return_softmax_lse=True, **options)
    return {"out": float((out - right).abs().max()), "lse": float((lse - right_lse).abs().max())}


def meets_in_a_mesh() -> Answer:
    """Split, join, attend and decode with meshes of one and of two dimensions as groups, and refuse one of three."""
    table, row = DeviceMesh("cpu", torch.arange(4).view(2, 2)), DeviceMesh("cpu", torch.arange(4))
    whole = torch.arange(4 * 6).view(12, 2)
    same = [
        torch.equal(join_sequence(split_sequence(whole, dim=0, group=g), dim=0, group=g), whole) for g in (table, row)
    ]
    q, k, v = part(seed=dist.get_rank())
    outs = [context_parallel_attention(q, k, v, group=group, is_causal=True) for group in (None, row, table)]
    same += [torch.allclose(outs[0], out, atol=1e-6) for out in outs[1:]]
    cube = DeviceMesh("cpu", torch.arange(4).view(2, 2, 1))
    refused = refusal(lambda: context_parallel_attention(q, k, v, group=cube))
    wrong = refusal(
        lambda: context_parallel_attention(q, k, v, group=table, scale=0.5 if dist.get_rank() == 3 else 1.0)
    )
    return {"same": same, "refused": refused, "wrong": wrong, **decodes(table)}


def trains() -> Answer:
    """Compute gradients as they are, through activation checkpoints and through a compiled function, and twice."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = context_parallel_attention(q.sin(), k, v, is_causal=True, schedule="ring", deterministic=True)
        assert isinstance(out, Tensor)
        return out.cos()

    compiled = torch.compile(attend, backend="aot_eager")
    ways: dict[str, Callable[..., Any]] = {
        "plain": attend,
        "again": attend,
        "checkpoint": lambda *leaves: checkpoint(attend, *leaves, use_reentrant=False),
        "compiled": compiled,
    }
    found = {}
    for name, way in ways.items():
        leaves = [one.requires_grad_() for one in part(seed=dist.get_rank())]
        out = way(*leaves)
        found[name] = [out, *torch.autograd.grad(out.square().sum(), leaves)]
    plain = found.pop("plain")
    return {name: all(map(torch.equal, plain, own)) for name, own in found.items()}


def tunes() -> Answer:
    """Measure the schedules of a call on ranks that say that they have a GPU, each with a store of its own."""
    rank, device = dist.get_rank(), device_named("h200")
    folder = Path(tempfile.mkdtemp())
    os.environ["BLOCKTUNE_DB"] = str(folder / "user.db")
    tune_schedule.current_device = measured_schedule.current_device = lambda: device
    q, k, v = (one.requires_grad_() for one in part(seed=rank))
    times_us = tune_schedule.tune_schedule(q, k, v, is_causal=True)
    ranks = Ranks.of(None)
    chosen = [str(request_of(ranks, q, k, v, is_causal=True).schedule)]
    request = request_of(ranks, q, k, v, is_causal=True)
    key = measured_schedule.key_of(request.problem, measured_schedule.link(None, "cpu"), backward=True)
    for schedule in Schedule:
        measured_schedule.take(device, key, schedule, 1.0)
        chosen.append(str(request_of(ranks, q, k, v, is_causal=True).schedule))
    other = request_of(ranks, *(one.detach() for one in (q, k, v)), is_causal=True).schedule  # without a backward
    with ResultStore.open() as store:
        kept = [best.config.parameters["schedule"] for best in store.kernel_bests(device)]
    document = known_rows(device)
    shutil.rmtree(folder)
    modelled = str(fastest(request.problem, machine_of(q.device)))
    return {
        "times_us": times_us, "chosen": chosen, "kept": kept, "sent": len(document),
        "without backward": str(other) == modelled,
    }  # fmt: skip


ENDINGS: dict[str, tuple[int, Callable[[], Answer]]] = {
    "dead": (3, partial(ends_with_a_dead_rank, attends)),
    "dead in decoding": (3, partial(ends_with_a_dead_rank, reads_cache)),
    "size": (3, ends_with_another_size),
    "absent": (3, partial(ends_with_an_absent_rank, attends)),
    "absent in decoding": (3, ends_decoding_with_an_absent_rank),
    "absent in a gather": (3, ends_a_failed_gather_with_an_absent_rank),
}
"""Plays in which ranks wait in vain, by their name: how many ranks each has, and what each of these does."""

PLAYS: dict[str, tuple[int, Callable[[], Answer]]] = {
    "refuses": (3, refuses),
    "descriptions": (2, sends_descriptions_once),
    "sequence": (3, splits_and_joins),
    "decode": (3, decodes),
    "mesh": (4, meets_in_a_mesh),
    "trains": (2, trains),
    "tunes": (2, tunes),
}
"""Other plays."""
