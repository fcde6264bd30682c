"""Calls of attention over several ranks, and what each rank finds of them against one device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blocktune import SequenceLayout, context_parallel_attention, split_sequence
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import Causal

NO_WINDOW = (-1, -1)
RAGGED = 37


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call on `ranks` ranks, of which `columns` trade heads.

    layout: a name, or the tokens of each rank. packed: where sequences begin. sinks: whether there are attention sinks.
    """

    ranks: int
    schedule: str
    columns: int = 1
    seqlen: int = RAGGED
    batch: int = 1
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    causal: bool = False
    window: tuple[int, int] = NO_WINDOW
    packed: tuple[int, ...] | None = None
    layout: str | tuple[int, ...] = "zigzag"
    lse: bool = True
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "float64"
    deterministic: bool = False

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name, None))

    @property
    def placed(self) -> SequenceLayout:
        """The tokens of each rank."""
        if isinstance(self.layout, tuple):
            return SequenceLayout.of_lengths(self.layout)
        make = SequenceLayout.zigzag if self.layout == "zigzag" else SequenceLayout.contiguous
        return make(self.seqlen, self.ranks)


BOUNDS = (0, 5, 5, 6, 19, 30, RAGGED)
"""Packed sequences, one of which is empty."""


def cases(ranks: int) -> Iterator[Case]:
    """Yield the calls on this many ranks: every schedule with every mask, and with everything else once."""
    heads = (6, 3) if ranks == 3 else (4, 2)
    ways = [("ring", 1), ("all_gather", 1), ("ulysses", 1)]
    ways += [("ring", 2), ("all_gather", 2)] if ranks == 4 else []
    masks = (False, NO_WINDOW), (False, (9, 4)), (True, NO_WINDOW), (True, (6, -1))
    for (schedule, columns), (causal, window), packed in product(ways, masks, (None, BOUNDS)):
        yield Case(
            ranks=ranks, schedule=schedule, columns=columns, heads=heads, causal=causal, window=window, packed=packed
        )
    for schedule, columns in ways:
        plain = Case(ranks=ranks, schedule=schedule, columns=columns, heads=heads)
        causal = replace(plain, causal=True)
        yield replace(causal, layout="contiguous", batch=2)
        yield replace(causal, layout="contiguous", window=(6, -1))
        yield replace(causal, seqlen=ranks - 1)  # a rank without tokens
        yield replace(plain, seqlen=1, layout="contiguous")
        yield replace(causal, layout=(*(0 for _ in range(ranks - 1)), RAGGED))
        yield replace(causal, seqlen=64, layout="zigzag", softcap=2.0, sinks=True, batch=2)
        yield replace(causal, dims=(16, 8), lse=False)
        yield replace(causal, dtype="float32", packed=(0, 11, 30))  # tokens after the last sequence
        yield replace(causal, dtype="bfloat16", sinks=True, lse=False, deterministic=True)


def many_cases(ranks: int) -> Iterator[Case]:
    """Yield more calls than an ordinary run has time for."""
    heads = {5: (5, 5), 6: (6, 2), 7: (7, 1), 8: (8, 2)}[ranks]
    ways = [("ring", 1), ("all_gather", 1), ("ulysses", 1)]
    ways += [("ring", 2), ("ring", 4), ("all_gather", 2), ("all_gather", 4)] if ranks == 8 else []
    for (schedule, columns), causal, window, packed, layout, seqlen in product(
        ways,
        (False, True),
        (NO_WINDOW, (3, -1), (12, 0), (2, 20)),
        (None, BOUNDS),
        ("zigzag", "contiguous"),
        (RAGGED, 5, 131),
    ):
        if packed is None or seqlen == RAGGED:
            yield Case(
                ranks=ranks, schedule=schedule, columns=columns, heads=heads, causal=causal, window=window,
                packed=packed, layout=layout, seqlen=seqlen, softcap=3.0 * causal, sinks=causal,
            )  # fmt: skip


def inputs(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Return the tensors of the whole sequence, and the gradients of its results."""
    generator = torch.Generator().manual_seed(case.seqlen)
    (heads, heads_kv), (dim, dim_v) = case.heads, case.dims

    def numbers(*sizes: int) -> Tensor:
        whole = torch.randn(*sizes, generator=generator, dtype=torch.float64)
        return whole.to(getattr(torch, case.dtype)).to(device)

    return {
        "q": numbers(case.batch, heads, case.seqlen, dim),
        "k": numbers(case.batch, heads_kv, case.seqlen, dim),
        "v": numbers(case.batch, heads_kv, case.seqlen, dim_v),
        "sinks": numbers(heads),
        "grad": numbers(case.batch, heads, case.seqlen, dim_v),
        "grad_lse": numbers(case.batch, heads, case.seqlen).double(),
    }


def expected(case: Case, device: str) -> dict[str, Tensor]:
    """Return what one device finds in float64, with gradients, however ranks share it."""
    return _expected(replace(case, ranks=1, schedule="", columns=1, layout="", deterministic=False), device)


@lru_cache(maxsize=256)
def _expected(case: Case, device: str) -> dict[str, Tensor]:
    given = {name: tensor.double() for name, tensor in inputs(case, device).items()}
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v", "sinks")]
    bounds = None if case.packed is None else torch.tensor(case.packed, dtype=torch.int32, device=device)
    extras = Extras(softcap=case.softcap, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    features = Features(window=case.window, softcap=case.softcap != 0, varlen=bounds is not None)
    causal = Causal.UPPER_LEFT if case.causal else Causal.NONE
    if case.causal:
        features = replace(features, window=(case.window[0], -1))
    out, lse = attention_reference(*leaves[:3], causal=causal, dtype=torch.float64, features=features, extras=extras)
    lse = lse.view(out.shape[:3])
    if case.sinks:
        out, lse = with_sinks(out, lse, leaves[3])
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    loss = (out * given["grad"]).sum() + (finite * given["grad_lse"]).sum() * case.lse
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = {f"d{name}": one for name, one in zip(("q", "k", "v", "sinks"), found, strict=True) if one is not None}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def found(case: Case, group: Any, device: str = "cpu", rival: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """Return what this rank finds, with gradients; those of sinks added up over all ranks. rival: attends in our
    place, in causal calls, and gives no log-sum-exp."""
    given = inputs(case, device)
    place: dict[str, Any] = {"dim": 2, "group": group, "layout": case.placed}
    leaves = [split_sequence(given[name], **place).requires_grad_() for name in ("q", "k", "v")]
    sinks = given["sinks"].requires_grad_() if case.sinks else None
    if rival is not None:
        out = rival(*leaves)
        gradients = torch.autograd.grad(out, leaves, split_sequence(given["grad"], **place))
        return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    out, lse = context_parallel_attention(
        *leaves,
        group=group,
        is_causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        s_aux=sinks,
        cu_seqlens=case.packed,
        layout=case.placed,
        schedule=case.schedule,
        deterministic=case.deterministic,
        return_lse=True,
    )
    finite = lse.masked_fill(lse.isneginf(), 0.0).double()
    loss = (out.double() * split_sequence(given["grad"], **place).double()).sum()
    loss = loss + (finite * split_sequence(given["grad_lse"], **place)).sum() * case.lse
    loss.backward()
    gradients = {f"d{name}": leaf.grad for name, leaf in zip(("q", "k", "v"), leaves, strict=True)}
    if sinks is not None:
        dist.all_reduce(sinks.grad, group=group if not hasattr(group, "ndim") else None)
        gradients["dsinks"] = sinks.grad
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def errors(case: Case, group: Any, device: str = "cpu", rival: Callable[..., Tensor] | None = None) -> dict[str, float]:
    """Return how far this rank's part of each result is from what one device finds, relative to the largest number.
    rival: see `found`."""
    case = case if rival is None else replace(case, lse=False)
    right, mine = expected(case, device), found(case, group, device, rival)
    place: dict[str, Any] = {"dim": 2, "group": group, "layout": case.placed}
    differences = {}
    for name, one in mine.items():
        whole = right[name]
        wanted = whole if name == "dsinks" else split_sequence(whole, **place)
        empty = one.isneginf() & wanted.isneginf()
        difference = (one.double() - wanted).masked_fill(empty, 0.0).abs().max() if one.numel() else torch.tensor(0.0)
        largest = whole.masked_fill(whole.isneginf(), 0.0).abs().max().clamp(min=1e-3)
        differences[name] = float(difference / largest)
    return differences
