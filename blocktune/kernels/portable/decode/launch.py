"""From a decoding config to its two launches: arguments, workspace and grids, on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from blocktune.kernels.base.feature_arguments import slopes_of
from blocktune.kernels.base.flash_kernel import LOG2_E, operand_widths, padded_width
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.launch import TritonLaunch, can_pin, launcher_of
from blocktune.kernels.base.precision import product_precision
from blocktune.kernels.base.specialize import in_units
from blocktune.kernels.base.steps import new_memory
from blocktune.kernels.hardware.limits import MULTIPROCESSORS
from blocktune.kernels.portable.decode.arguments import Options
from blocktune.kernels.portable.decode.scratch import scratch
from blocktune.kernels.portable.decode.tiles import flash_decode_kernel, merge_splits_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import UNLIMITED, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal

VALUES_PER_WARP = 512
"""Of the workspace, that the merge reads with one warp: 16 a thread."""

PROGRAMS = 4 * MULTIPROCESSORS
"""How many programs the default's splits make of low tiles: a few for every multiprocessor."""

WORK = 5
"""The place of the workspace among the leading arguments."""

LATE, EARLY, PAIRED = 0, 1, 2
"""Values of `overlap`: the merge is launched when the splits have ended, or while they run, or of two splits the later
program merges and nothing is launched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch(TritonLaunch):
    """What `FlashDecode.bind` returns: launch(q, k, v, out, lse, scale[, extras]).

    merge: the second launch, which takes the workspace in place of q; None with one split, and with a pair.
    """

    merge: TritonLaunch | None

    def __call__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
        self._launch(q, k, v, out, lse, scale, extras)

    def _launch(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> Any:
        arguments = self.leading(q, k, v, out, lse, scale, extras)
        compiled = self.function[self.grid](*arguments, *self.trailing(q, k, v, out), **self.options)
        if self.merge is not None:
            self.merge(arguments[WORK], None, None, out, lse, scale)
        return compiled

    def pinned(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> Launch:
        """Pin the launch as `TritonLaunch.pinned` does; the tensors of the extras must keep their strides and
        alignment, too."""
        arguments = (q, k, v, out, lse, scale, extras)
        compiled = self._launch(*arguments)
        if not can_pin(compiled):
            return self
        leading, trailing = self.leading, self.trailing(q, k, v, out)
        if self.merge is None:
            launch = launcher_of(compiled, self.grid, leading, trailing)
        else:
            merge = self.merge.pinned(leading(*arguments)[WORK], None, None, out, lse, scale)
            launch = _in_two(leading, launcher_of(compiled, self.grid, None, trailing), merge)
        launch(*arguments)
        return launch


def _in_two(leading: Callable[..., tuple[Any, ...]], split: Launch, merge: Launch) -> Launch:
    """Return the launch of the kernel that leaves shares in a workspace, and of the one that merges them."""

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
        arguments = leading(q, k, v, out, lse, scale, extras)
        split(*arguments)
        merge(arguments[WORK], None, None, out, lse, scale)

    return launch


def decode_launch(config: KernelConfig, shape: AttentionShape, *, batch_invariant: bool = False) -> DecodeLaunch:
    """Return the launch of a config for tensors of this shape. batch_invariant: rows are equal to the bit whatever the
    batch is."""
    sizes, splits, paired = first_sizes(config, shape), config.parameters["splits"], is_paired(config)
    programs = shape.batch * shape.num_heads_kv * sizes["row_tiles"]
    return DecodeLaunch(
        function=flash_decode_kernel,
        grid=(programs, splits, 1),
        leading=partial(_leading_with_counters, workspace_elements(config, shape), programs if paired else 0),
        trailing=partial(trailing, (*sizes.values(), options_of(config, shape))),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        merge=_merge_launch(config, shape, batch_invariant) if splits > 1 and not paired else None,
    )


def is_paired(config: KernelConfig) -> bool:
    """Return whether the later of two programs merges their shares."""
    return config.parameters["overlap"] == PAIRED


def workspace_elements(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the float32 numbers that all splits leave; 0 with one split, which writes the output itself."""
    splits = config.parameters["splits"]
    return splits * shape.batch * shape.num_heads * shape.seqlen_q * (shape.head_dim_v + 2) if splits > 1 else 0


def leading(
    workspace: int, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS
) -> tuple[Any, ...]:
    """Return the arguments that change with every call, a new workspace of `workspace` elements among them, if any."""
    table, tree, slopes = extras.block_table, extras.tree_mask, slopes_of(extras)
    tensors = q, k, v, out, lse, None
    if workspace:
        import torch

        tensors = q, k, v, out, None, new_memory(workspace, torch.float32, q.device)
    return (
        *tensors,
        extras.cache_seqlens,
        table,
        tree,
        slopes,
        scale * LOG2_E,
        extras.softcap * LOG2_E,
        0 if table is None else table.stride(0),
        0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0),
        *((0, 0) if tree is None else tree.stride()[:2]),
    )


def _leading_with_counters(
    workspace: int, counters: int, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS
) -> tuple[Any, ...]:
    """Return the leading arguments, and after them `counters` zeros that the programs of a pair share, or None. Where
    pairs merge, the first kernel writes the log-sum-exp."""
    if not counters:
        return *leading(workspace, q, k, v, out, lse, scale, extras), None
    found = leading(0, q, k, v, out, lse, scale, extras)
    work, zeros = _pair_memory(q.device, counters, workspace)
    return *found[:WORK], work, *found[WORK + 1 :], zeros


def _pair_memory(device: Any, counters: int, workspace: int) -> tuple[Any, Any]:
    """Return the workspace and the counters of pairs: those of the stream, and new ones on a CPU, where Triton's
    interpreter runs."""
    if device.type == "cuda":
        return scratch(device, counters, workspace)
    import torch

    return torch.empty(workspace, device=device), torch.zeros(counters, dtype=torch.int32, device=device)


def trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    """Return the arguments that depend on sizes and strides only: strides, `fixed` and the unit of the strides."""
    strides, unit = in_units((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]))
    return *strides, *fixed, unit


def _merge_launch(config: KernelConfig, shape: AttentionShape, batch_invariant: bool) -> TritonLaunch:
    arguments = merge_arguments(config, shape, batch_invariant=batch_invariant)
    splits, part = arguments["SPLITS"], arguments["BLOCK_D"]
    early = {"launch_pdl": 1} if arguments["OVERLAP"] else {}
    return TritonLaunch(
        function=merge_splits_kernel,
        grid=(arguments["total_rows"], -(-shape.head_dim_v // part), 1),
        leading=_merge_leading,
        trailing=partial(_merge_trailing, tuple(arguments.values())),
        options={"num_warps": max(1, min(8, splits * part // VALUES_PER_WARP)), "num_stages": 1} | early,
    )


def _merge_leading(work: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    del k, v, scale
    return out, lse, work


def _merge_trailing(fixed: tuple[Any, ...], work: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    del work, k, v
    return *out.stride()[:3], *fixed


def merge_arguments(config: KernelConfig, shape: AttentionShape, *, batch_invariant: bool = False) -> dict[str, Any]:
    """Return the integers and constexpr arguments of the merge, in order. Few rows are cut into parts, to make
    programs, and so are all where the batch must not decide: the width of a part says in which order the splits are
    added up."""
    rows = shape.batch * shape.num_heads * shape.seqlen_q
    narrow = rows < PROGRAMS or batch_invariant
    return {
        "num_heads": shape.num_heads,
        "seqlen_q": shape.seqlen_q,
        "total_rows": rows,
        "SPLITS": config.parameters["splits"],
        "HEAD_DIM_V": shape.head_dim_v,
        "BLOCK_D": min(padded_width(shape.head_dim_v), 32 if narrow else 128),
        "OVERLAP": config.parameters["overlap"] == EARLY,
    }


def first_sizes(config: KernelConfig, shape: AttentionShape) -> dict[str, int]:
    """Return the run-time integers of the first kernel that the shape says, in order."""
    left, right = _bounds(shape)
    return {
        "num_heads": shape.num_heads,
        "num_heads_kv": shape.num_heads_kv,
        "group_size": shape.group_size,
        "row_tiles": -(-shape.group_size * shape.seqlen_q // config.block_m),
        "total_rows": shape.batch * shape.num_heads * shape.seqlen_q,
        "seqlen_q": shape.seqlen_q,
        "seqlen_k": shape.seqlen_k,
        "left": 0 if left == UNLIMITED else left,
        "right": 0 if right == UNLIMITED else right,
    }


def _bounds(shape: AttentionShape) -> tuple[int, int]:
    """Return (left, right) of the keys around the diagonal that a query sees, by window and causal mask; or
    `UNLIMITED`."""
    left, right = shape.features.window or (UNLIMITED, UNLIMITED)
    return left, right if shape.causal is Causal.NONE else 0


def options_of(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of the first kernel."""
    (left, right), (width, width_v), splits = _bounds(shape), operand_widths(shape), config.parameters["splits"]
    return Options(
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_V=shape.head_dim_v,
        WIDTH=width,
        WIDTH_V=width_v,
        PAGE_SIZE=shape.features.page_size,
        FROM_START=shape.causal is Causal.UPPER_LEFT,
        LEFT=left != UNLIMITED,
        RIGHT=right != UNLIMITED,
        WORDS=-(-shape.seqlen_q // 32) if shape.features.mask is MaskKind.TREE else 0,
        SOFTCAP=shape.features.softcap,
        PRECISION=product_precision(shape.dtype),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        STAGES=config.num_stages,
        OVERLAP=config.parameters["overlap"] == EARLY and splits > 1,
        PAIRED=is_paired(config),
        OF_TOKENS=shape.features.token_scales,
    )
