"""Attention backward for Hopper (compute capability 9.0) in Gluon: warp-specialised, asynchronous, five products.

Three launches: `prepare_kernel` (row statistics, empty dq sums), `flash_bwd_hopper_kernel`, whose blocks own 128 keys
and add their parts of dq to float32 sums in global memory, and `finish_kernel` (dq in its type); a fourth where groups
are walked along in parts (parts.py). The kernel is in device_kernel.py, its device functions and what makes them fast
in warps.py; heads wider than 128 have a kernel of their own with 64 keys (wide/warps.py), or 128 where values have 128
columns at most (wide/halves.py). It takes what
kernels/hopper/forward/kernel.py takes: 16-bit types, any lengths, heads from 24 to 256 elements, both causal masks,
windows, a soft cap and packed sequences.

The order of those additions varies, so that dq is not equal to the bit in every run, unless `deterministic` asks for a
fixed one (turns.py); dk and dv always are.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from blocktune.kernels.base.feature_arguments import DENSE_FEATURES
from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, WARPGROUP_WARPS, contiguous_strides
from blocktune.kernels.base.kernel import MAX_HEAD_DIM, AttentionKernel, CompileSpec, SoftmaxCost
from blocktune.kernels.base.loops import BackwardLoops
from blocktune.kernels.base.on_chip import OnChip, gradient_tiles, shared_tile
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import DescriptorArgument, TensorArgument, named_in_units, specialize
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hopper.backward.arguments import Options
from blocktune.kernels.hopper.backward.device_kernel import SIZES, flash_bwd_hopper_kernel
from blocktune.kernels.hopper.backward.launch import PASS_ROWS, WARPS, BackwardLaunch, gradient_blocks, sums_descriptor
from blocktune.kernels.hopper.backward.layout import (
    BARRIER_BYTES,
    BLOCK_M,
    BLOCK_N,
    HEAD_DIM_DIVISOR,
    LIST_ARGUMENTS,
    MIN_HEAD_DIM,
    NARROW_HEADS,
    PANEL,
    REGISTERS,
    WIDE_BLOCK_N,
    Rows,
    added_rows,
    adds_registers,
    ahead_switches,
    bytes_beside_dq,
    descriptor_width,
    dq_bytes,
    dq_part,
    dq_slots,
    form_arguments,
    form_of,
    has_halves,
    is_added_apart,
    is_deferred,
    is_listed,
    is_plain,
    is_wide,
    keys_of_block,
    panels,
    runs_ahead,
    sums_part,
    tail_of,
    tile_width,
    width_of,
    width_v,
)
from blocktune.kernels.hopper.backward.parts import default_parts, heads_per_group, possible_parts
from blocktune.kernels.hopper.backward.pre_and_post import (
    finish_kernel,
    finish_rows_kernel,
    join_parts_kernel,
    prepare_kernel,
    prepare_rows_kernel,
)
from blocktune.kernels.hopper.backward.wide.device_kernel import flash_bwd_hopper_wide_kernel
from blocktune.kernels.hopper.backward.wide.join import gradient_strides, join_spec, join_wide_parts_kernel
from blocktune.kernels.hopper.biases.arguments import (
    example_key_biases,
    example_row_biases,
    mask_code,
    turned_spec,
)
from blocktune.kernels.hopper.biases.mask_pass import lay_out_mask_kernel
from blocktune.kernels.hopper.common.descriptors import undescribable
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction


class FlashBackwardHopper(AttentionKernel):
    """The warp-specialised backward kernel of Hopper.

    fold_lse, fold_delta: the statistics of a query are the initial accumulators of its products. named_barriers: bit 0
    for the exchange of dS, bit 1 for the release of stages. persistent: as many blocks as multiprocessors.
    group_parts: in how many parts the query heads that share keys are walked along, each by blocks of its own, whose
    gradients of keys and values a fourth launch adds up.
    """

    name = "flash_bwd_hopper"
    ladder_steps: ClassVar[tuple[str, ...]] = ("hopper",)
    direction = Direction.BACKWARD
    loops = BackwardLoops(rewrites_lse=True, parts="group_parts", lays_out_masks=True)
    features = DENSE_FEATURES | {"deterministic"}
    most_barrier_bytes = BARRIER_BYTES
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (BLOCK_M,),
        "block_n": (WIDE_BLOCK_N, BLOCK_N),
        "num_warps": (WARPS,),
        "num_stages": (2, 3, 4),
        "fold_lse": (0, 1),
        "fold_delta": (0, 1),
        "named_barriers": (0, 1, 2, 3),
        "persistent": (0, 1),
        "group_parts": (1, 2, 3, 4, 5, 6, 7, 8, 16),
    }
    follows_shape: ClassVar[tuple[str, ...]] = ("group_parts",)

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if limits.cc != (9, 0):
            return f"{self.name} is made of wgmma (compute capability 9.0 alone), but got {limits.name}"
        if shape.element_bytes != 2:
            return f"{self.name} computes float16 and bfloat16, but got {shape.dtype}"
        if shape.features.dropout and is_wide(shape):
            return f"{self.name} has no dropout for heads wider than 128, but got head_dim={shape.head_dim}"
        for name, dim in (("head_dim", shape.head_dim), ("head_dim_v", shape.head_dim_v)):
            if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM or dim % HEAD_DIM_DIVISOR:
                return (
                    f"`{MIN_HEAD_DIM} <= {name} <= {MAX_HEAD_DIM}`, in steps of {HEAD_DIM_DIVISOR}, must hold for "
                    f"{self.name}, but got {name}={dim}"
                )
        return None

    def steps_back(self, shape: AttentionShape) -> bool:
        """Return whether heads are so narrow that nothing is known of their features: without any, the portable kernels
        took 20 to 48 % more time on an H200."""
        return max(shape.head_dim, shape.head_dim_v) <= NARROW_HEADS and bool(shape.features)

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the broken rules, besides the range of every parameter: what goes with the shape."""
        problems = super().rule_violations(config, shape, limits)
        if problems:
            return problems
        own, features = config.parameters, shape.features
        if config.block_n != keys_of_block(shape):
            return (
                f"`block_n` {keys_of_block(shape)} of {self.name} must hold for head_dim up to {width_of(shape)}, "
                f"but got {config.block_n}.",
            )
        if is_wide(shape) and own["named_barriers"] & 2:
            return (
                f"`named_barriers` 0 or 1 of {self.name} must hold for heads wider than 128, but got "
                f"{own['named_barriers']}.",
            )
        if tail_of(shape) and not runs_ahead(shape, config):
            return (f"{ahead_switches(shape)} of {self.name} must hold for heads of 65 to 96 columns, but got {own}.",)
        if features.softcap and own["fold_lse"]:
            return (f"`fold_lse` 0 of {self.name} must hold under a soft cap, which bends the products, but got 1.",)
        if features.dropout and not own["fold_delta"]:
            return (f"`fold_delta` 1 of {self.name} must hold under dropout, which leaves it alone, but got 0.",)
        if (features.varlen or features.deterministic) and not own["persistent"]:
            return (f"`persistent` 1 of {self.name} must hold for {features.label}: tiles come from a counter.",)
        return self._parts_violations(own["group_parts"], shape)

    def _parts_violations(self, parts: int, shape: AttentionShape) -> tuple[str, ...]:
        if shape.group_size % parts:
            return (
                f"`group_parts` of {self.name} must divide the query heads that share keys, but got {parts} of "
                f"{shape.group_size}.",
            )
        if parts not in possible_parts(shape, (parts,)):
            what = (
                "wide heads or a fixed order" if shape.features.varlen else "wide heads in a fixed order or block mask"
            )
            return (f"`group_parts` 1 of {self.name} must hold for {what}, but got {parts}.",)
        return ()

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of all but the barriers."""
        slots = dq_slots(shape, config)
        return bytes_beside_dq(shape, config.num_stages) + slots * dq_bytes(shape)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return at head_dim 64, 128 and 256 what was best on an H200 over lengths of 2048 and 8192, causal and full;
        others start from that, wider heads with as many stages as fit."""
        stages, fold_lse, fold_delta, named = (2, 1, 1, 3) if tile_width(shape) == 128 else (3, 0, 1, 3)
        if is_wide(shape):
            stages = 2 if max(width_of(shape), width_v(shape)) == 256 else 3
            fold_lse, fold_delta, named = (1, 0, 1) if shape.causal is Causal.NONE else (0, 1, 0)
        if has_halves(shape):
            stages, fold_lse, fold_delta, named = 2, 0, 1, 1
        if shape.features.softcap:
            fold_lse, fold_delta = 0, 1
        parts = default_parts(shape, self.parameters["group_parts"])
        values = (BLOCK_M, keys_of_block(shape), WARPS, stages, fold_lse, fold_delta, named, 1, parts)
        return KernelConfig.of(self.name, dict(zip(self.parameters, values, strict=True)))

    def as_forward(self, config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        """Return the forward in which each part of a group counts as a head of keys of its own."""
        heads = shape.num_heads_kv * config.parameters["group_parts"]
        return super().as_forward(config, replace(shape, num_heads_kv=heads))

    def total_warps(self, config: KernelConfig) -> int:
        return 3 * WARPS

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return the tiles: two warpgroups own the keys and exchange dS; dQ leaves through shared memory in two halves.
        Of wider heads than 128 with 64 keys they share the products, exchange P too, and have one slot of dO less; dQ
        leaves panel by panel. In a fixed order dQ of two steps may be on its way."""
        m, n, short, stages = config.block_m, config.block_n, shape.element_bytes, config.num_stages
        d, d_v = (width_of(shape), width_v(shape)) if is_wide(shape) else (tile_width(shape),) * 2
        shared = is_wide(shape) and not has_halves(shape)  # products, not keys
        exchanged = [shared_tile("P", n, m, FLOAT32_BYTES)] if shared else []
        columns_out = 2 * PANEL if is_wide(shape) else d
        slots = {"Q": stages, "dO": stages - shared}
        statistics = {"LSE": stages, "delta": stages - shared}
        return OnChip(
            tiles=(
                *(shared_tile(name, n, columns, short) for name, columns in (("K", d), ("V", d_v))),
                *(shared_tile(name, m, columns, short, slots[name]) for name, columns in (("Q", d), ("dO", d_v))),
                *(shared_tile(name, m, 1, FLOAT32_BYTES, count) for name, count in statistics.items()),
                *exchanged,
                shared_tile("dS", n, m, short, 1 if shared else 2),
                shared_tile("dQ on its way out", m, columns_out, FLOAT32_BYTES, dq_slots(shape, config)),
                *gradient_tiles(m, n, (d, d_v), short),
            ),
            num_warps=2 * WARPGROUP_WARPS,
        )

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        persistent = bool(config.parameters["persistent"])
        return SoftmaxCost(
            rescales=False, products_overlap=True, copying_warps=WARPS, persistent=persistent, products=5,
            adds_walked=True, adds_ahead=True, exchanges=True,
        )  # fmt: skip

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        return undescribable(self.name, query=q, key=k, value=v) or super().layout_problem(q, k, v)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(
            prepare_kernel, prepare_rows_kernel, flash_bwd_hopper_kernel, flash_bwd_hopper_wide_kernel, finish_kernel,
            finish_rows_kernel, join_parts_kernel, join_wide_parts_kernel, lay_out_mask_kernel,
        )  # fmt: skip

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        leading = (1,) * (3 if shape.features.varlen else 2)
        query = DescriptorArgument(shape.dtype, (*leading, BLOCK_M, descriptor_width(shape)), swizzled=True)
        key = DescriptorArgument(shape.dtype, (*leading, keys_of_block(shape), descriptor_width(shape)), swizzled=True)
        statistic = DescriptorArgument("float32", (BLOCK_M,), swizzled=True)
        arguments: dict[str, Any] = {"q_desc": query, "k_desc": key, "v_desc": key, "do_desc": query}
        arguments |= {"dq_desc": _sums_stand_in(shape), "dk_desc": query, "dv_desc": query}
        arguments |= {"lse_desc": statistic, "delta_desc": statistic, "counter": TensorArgument("int32")}
        if config.parameters["group_parts"] > 1 and not is_wide(shape):
            arguments |= dict.fromkeys(("dk_desc", "dv_desc"), arguments["dq_desc"])
        arguments |= {"scale": 1.0, "scale_log2": 1.0} | _sizes(config, shape)
        arguments |= {"OPTIONS": options_of(config, shape)}
        cap_in = 1.0 if shape.features.softcap else None
        arguments |= form_arguments(shape, _rows(shape), cap_in, _lengths(shape), _turns(shape))
        registers = adds_registers(shape, bool(config.parameters["persistent"]))
        arguments |= {"dq_sums": TensorArgument("float32") if registers else None} | _list_arguments(shape)
        arguments |= example_key_biases(shape)
        function = flash_bwd_hopper_wide_kernel if is_wide(shape) else flash_bwd_hopper_kernel
        return specialize(function, arguments, {"num_warps": WARPS})

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        parts = config.parameters["group_parts"]
        make = join_spec if is_wide(shape) else _join_spec
        join = [make(shape, parts)] if parts > 1 else []
        return (*self._passes(config, shape), *join, *([turned_spec(shape)] if mask_code(shape) else []))

    def _passes(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        """Return the kernels before and after."""
        own, sums = TensorArgument(shape.dtype), TensorArgument("float32")
        strides_o, strides_q = (tuple(contiguous_strides(shape, letter).values()) for letter in "oq")
        before: dict[str, Any] = {"out": own, "dout": own, "lse": sums, "lse_log2": sums, "delta": sums}
        before |= {"dq_sums": sums, "counter": TensorArgument("int32")}
        before |= {"lse_factor": 1.0 if runs_ahead(shape, config) else None}
        names_o = ("stride_ob", "stride_oh", "stride_om", "stride_gb", "stride_gh", "stride_gm")
        of_rows = dict(zip(names_o, strides_o * 2, strict=True))
        of_sums = dict(zip(("stride_b", "stride_h", "stride_m"), strides_q, strict=True))
        after: dict[str, Any] = {"dq_sums": sums, "dq": own, "scale": 1.0}
        lengths = {"num_heads": shape.num_heads, "seqlen_q": shape.seqlen_q}
        before, after, options = before | lengths, after | lengths, {"num_warps": WARPS}
        after |= {"HEAD_DIM": shape.head_dim, "TRANSPOSED": is_deferred(shape)}
        if is_plain(shape):
            before |= of_rows | {"HEAD_DIM": shape.head_dim, "ROWS": PASS_ROWS}
            after |= of_sums | {"HALF": dq_part(shape)}
            return specialize(prepare_kernel, before, options), specialize(finish_kernel, after, options)
        rows = _rows(shape)
        common = {"cu_q": _lengths(shape).cu_seqlens_q, "rows": rows.of_head, "WIDTH": width_of(shape)}
        before |= common | {"turns": _turns(shape), "programs": rows.longest // PASS_ROWS, "ROWS": PASS_ROWS}
        before |= {"stride_lb": shape.num_heads * shape.seqlen_q, "stride_lh": shape.seqlen_q}
        before |= example_row_biases(shape) | named_in_units(of_rows)
        before |= {"HEAD_DIM_V": shape.head_dim_v, "BLOCK_M": BLOCK_M, "ADDITIVE": mask_code(shape) == 2}
        after |= common | named_in_units(of_sums) | {"programs": rows.longest // BLOCK_M, "PART": sums_part(shape)}
        return specialize(prepare_rows_kernel, before, options), specialize(finish_rows_kernel, after, options)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> BackwardLaunch:
        return BackwardLaunch(shape, tuple(_sizes(config, shape).values()), options_of(config, shape))


def _join_spec(shape: AttentionShape, parts: int) -> CompileSpec:
    own, sums = TensorArgument(shape.dtype), TensorArgument("float32")
    arguments: dict[str, Any] = {"dk_sums": sums, "dv_sums": sums, "dk": own, "dv": own}
    arguments |= {"cu_k": _lengths(shape).cu_seqlens_k, "scale": 1.0} | gradient_strides(shape)
    arguments |= {"num_heads_kv": shape.num_heads_kv, "seqlen_k": shape.seqlen_k, "blocks": gradient_blocks(shape)}
    arguments |= {"HEAD_DIM": shape.head_dim, "HEAD_DIM_V": shape.head_dim_v, "WIDTH": width_of(shape), "PARTS": parts}
    return specialize(join_parts_kernel, arguments, {"num_warps": WARPS})


def _rows(shape: AttentionShape) -> Rows:
    return Rows.of(shape, shape.batch * shape.seqlen_q if shape.features.varlen else shape.seqlen_q)


def _turns(shape: AttentionShape) -> TensorArgument | None:
    return TensorArgument("int32") if shape.features.deterministic else None


def _lengths(shape: AttentionShape) -> Extras:
    """Return what stands for the beginnings of packed sequences."""
    stand_in: Any = TensorArgument("int32") if shape.features.varlen else None
    return Extras(cu_seqlens_q=stand_in, cu_seqlens_k=stand_in)


def _list_arguments(shape: AttentionShape) -> dict[str, Any]:
    values = (TensorArgument("int32"), 1, 1, 1) if is_listed(shape) else (None,) * len(LIST_ARGUMENTS)
    return dict(zip(LIST_ARGUMENTS, values, strict=True))


def _sizes(config: KernelConfig, shape: AttentionShape) -> dict[str, int]:
    """Return the integers of a launch, in which each part of a group counts as a head of keys of its own."""
    parts = config.parameters["group_parts"]
    heads, group = shape.num_heads_kv * parts, shape.group_size // parts
    values = (
        shape.seqlen_q, shape.seqlen_k, heads, group, shape.batch * heads, heads_per_group(shape, parts),
    )  # fmt: skip
    return dict(zip(SIZES, values, strict=True))


def options_of(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of a config."""
    own, (qk_panels, v_panels) = config.parameters, panels(shape) if is_wide(shape) else (1, 1)
    consumer_regs, other_regs = REGISTERS
    persistent, parts, ahead = bool(own["persistent"]), own["group_parts"], runs_ahead(shape, config)
    return Options(
        BLOCK_M=BLOCK_M,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        DO_STAGES=config.num_stages - (is_wide(shape) and not has_halves(shape)),
        PANELS=qk_panels,
        V_PANELS=v_panels,
        TAIL=tail_of(shape),
        **form_of(shape),
        FOLD_LSE=bool(own["fold_lse"]),
        FOLD_DELTA=bool(own["fold_delta"]),
        NAMED_EXCHANGE=bool(own["named_barriers"] & 1),
        NAMED_RELEASE=bool(own["named_barriers"] & 2),
        PERSISTENT=persistent,
        PARTS=parts,
        GROUPED=is_wide(shape) or shape.group_size > parts,
        AHEAD=ahead,
        ADDERS=ahead or is_added_apart(shape, persistent),
        DQ_SLOTS=dq_slots(shape, config),
        CONSUMER_REGS=consumer_regs,
        OTHER_REGS=other_regs,
    )


def _sums_stand_in(shape: AttentionShape) -> Any:
    from triton import language as tl
    from triton.runtime.jit import MockTensor

    return sums_descriptor(MockTensor(tl.float32), 64, added_rows(shape))
