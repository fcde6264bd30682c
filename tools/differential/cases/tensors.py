"""The tensors of a case: memory, and views of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.differential.cases.case import Case, Layout
from tools.differential.cases.enums import Entry, Mode, Values

DIMENSIONS = "bhs"
LARGE, TINY = 1e4, 1e-4


@dataclass(frozen=True, slots=True)
class View:
    """A tensor [batch, heads, rows, columns] and the memory under it."""

    tensor: Tensor
    memory: Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a case calls with. The mask is [batch or 1, heads or 1, queries or 1, keys or 1]."""

    query: View
    key: View
    value: View
    grad: Tensor
    mask: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None

    @property
    def wanted(self) -> list[Tensor]:
        """Mask, slopes and sinks, of which a gradient is wanted."""
        given = self.mask, self.slopes, self.sinks
        return [each for each in given if each is not None and each.requires_grad]

    @property
    def memories(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query.memory, self.key.memory, self.value.memory


def inputs_of(case: Case, device: torch.device) -> Inputs:
    """The tensors of a case, the same ones for the same case on the same kind of device."""
    generator = torch.Generator(device).manual_seed(case.seed)
    kind = case.kind
    dtype = torch.float32 if case.mode is Mode.AUTOCAST else getattr(torch, kind.dtype)
    batch, rows_q, rows_k = case.batch, case.seqlen_q, case.seqlen_k
    if kind.is_packed:
        batch, rows_q, rows_k = 1, *(sum(lengths) for lengths in zip(*case.sequences, strict=True))
    sizes_k = batch, case.kind.heads_kv, rows_k
    return Inputs(
        _fill(view_of((batch, case.heads, rows_q), kind.head_dim, case.query, dtype, generator), case, generator),
        _fill(view_of(sizes_k, kind.head_dim, case.key, dtype, generator), case, generator),
        _fill(view_of(sizes_k, kind.head_dim_v, case.value, dtype, generator), case, generator),
        view_of((batch, case.heads, rows_q), kind.head_dim_v, case.grad, dtype, generator).tensor,
        mask_of(case, dtype, generator).requires_grad_(kind.gradients and "m" in case.needs)
        if kind.mask != "none"
        else None,
        _require_grad(slopes_of(case, generator), case, "a") if kind.alibi else None,
        _require_grad(sinks_of(case, dtype, generator), case, "s") if kind.sinks else None,
    )


def _require_grad(tensor: Tensor, case: Case, name: str) -> Tensor:
    """The tensor, which requires a gradient if the case says so."""
    return placed(tensor, case).requires_grad_(case.kind.gradients and name in case.needs)


def placed(tensor: Tensor, case: Case) -> Tensor:
    """The tensor, where the case says so with its numbers apart in memory."""
    return torch.stack((tensor, tensor - 1), -1)[..., 0] if case.apart else tensor


def view_of(
    sizes: tuple[int, int, int], columns: int, layout: Layout, dtype: torch.dtype, generator: torch.Generator
) -> View:
    """Normal numbers in memory of this layout, and the view of it."""
    outer = {letter: 1 if letter in layout.expanded else size for letter, size in zip(DIMENSIONS, sizes, strict=True)}
    own = outer | {"s": outer["s"] + (layout.extra_rows if outer["s"] else 0)}
    columns_in_memory = 1 if layout.last_strided and layout.expanded else columns
    width = columns_in_memory + layout.padding
    order = layout.order
    shape = [own[letter] for letter in order]
    shape = [width, *shape] if layout.last_strided else [*shape, width]
    memory = torch.randn(layout.offset + _product(shape), generator=generator, device=generator.device).to(dtype)
    dense = memory[layout.offset :].view(shape)
    dense = dense.movedim(0, -1) if layout.last_strided else dense
    dense = dense.permute(*(order.index(letter) for letter in DIMENSIONS), 3)
    return View(dense[:, :, : outer["s"], :columns_in_memory].expand(*sizes, columns), memory)


def _product(sizes: list[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _fill(view: View, case: Case, generator: torch.Generator) -> View:
    """The same view with the case's kind of values in its memory."""
    memory, count = view.memory, view.memory.numel()
    if case.values is Values.LARGE:
        memory *= LARGE
    elif case.values is Values.TINY:
        memory *= TINY
    elif case.values is Values.CONSTANT:
        memory.fill_(0.5)
    elif case.values is Values.ZEROS:
        memory.zero_()
    elif case.values is not Values.NORMAL and count:
        few = 1 if case.values is Values.NAN else 3
        places = torch.randint(count, (few,), generator=generator, device=memory.device)
        spikes = {Values.SPIKES: (LARGE, -LARGE, LARGE), Values.INF: (float("inf"), float("-inf"), float("inf"))}
        chosen = spikes.get(case.values, (float("nan"),))
        memory[places] = torch.tensor(chosen, dtype=memory.dtype, device=memory.device)
    return view


def mask_of(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """The mask of a case, with rows of an odd length in memory or of a multiple of 16."""
    kind, device = case.kind, generator.device
    full = case.batch, case.heads, case.seqlen_q, case.seqlen_k
    batch, heads, queries, keys = (1 if name == "1" else own for name, own in zip(case.mask_sizes, full, strict=True))
    width = keys | 1 if kind.mask_row_odd else -(-keys // 16) * 16
    rows, columns = (width, queries) if kind.mask_transposed else (queries, width)
    seen = torch.rand(batch, heads, rows, columns, generator=generator, device=device) > 0.3
    seen = (seen.mT if kind.mask_transposed else seen)[..., :keys]
    hide(seen, case, generator)
    if kind.mask == "boolean":
        return seen
    bias = torch.randn(seen.shape, generator=generator, device=device)
    bias = torch.empty_strided(seen.shape, seen.stride(), device=device).copy_(bias)
    own = torch.float32 if kind.mask == "float32" else dtype
    bias = _hide(bias, ~seen, torch.finfo(dtype if case.hides == "least_of_type" else own).min, case)
    if case.stray and bias.numel():
        bias[tuple(size // 2 for size in bias.shape)] = float(case.stray)
    return bias.to(own)


def hide(seen: Tensor, case: Case, generator: torch.Generator) -> None:
    """Hides the case's kind of pairs in a mask [batch, heads, queries, keys]. Padding goes with a causal mask, as
    transformers makes them."""
    batch, _, queries, keys = seen.shape
    if case.hidden == "rows" and queries:
        seen[:, :, :: 1 + queries // 3] = False
    elif case.hidden in ("all", "none"):
        seen.fill_(case.hidden == "none")
    elif case.hidden in ("left", "right"):
        own = torch.arange(keys, device=seen.device)
        padding = torch.randint(keys + 1, (batch, 1), generator=generator, device=seen.device)
        real = own >= padding if case.hidden == "left" else own < keys - padding
        rows = torch.arange(queries, device=seen.device)[:, None]
        causal = own <= rows + (keys - queries) if queries > 1 else torch.ones_like(own, dtype=torch.bool)[None]
        seen.copy_(real[:, None, None] & causal)


def _hide(bias: Tensor, where: Tensor, least: float, case: Case) -> Tensor:
    """The mask with what hides a pair in these places."""
    if case.hides == "infinity":
        return bias.masked_fill(where, float("-inf"))
    bias = bias.masked_fill(where, least)
    if case.hides == "mixed":
        odd = torch.arange(bias.shape[-1], device=bias.device) % 2 == 1
        bias = bias.masked_fill(where & odd, float("-inf"))
    return bias


def sinks_of(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A logit of every head, in models of transformers of the type of the tensors."""
    sinks = torch.randn(case.heads, generator=generator, device=generator.device) * 2.0
    return sinks.to(dtype) if case.kind.entry is Entry.TRANSFORMERS else sinks


def slopes_of(case: Case, generator: torch.Generator) -> Tensor:
    """ALiBi's slopes: float32 [heads] or [batch, heads]."""
    batch = len(case.sequences) or case.batch
    sizes = (batch, case.heads) if case.kind.slopes_by_batch else (case.heads,)
    return torch.rand(sizes, generator=generator, device=generator.device) / 4
