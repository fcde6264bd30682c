"""Attention forward for Hopper (compute capability 9.0) in Gluon: warp-specialised, asynchronous, persistent.

The device functions and what makes them fast are in kernels/hopper_tiles.py. This kernel takes what suits it (16-bit
types, head_dim 64 or 128, lengths that 128 divides, dense [batch, heads, length, head_dim] or [batch, length, heads,
head_dim] memory) and leaves everything else to the portable kernels.
"""

import functools
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.flash_kernel import LOG2_E, heads_per_group
from blocktune.kernels.hopper_tiles import consumer, producer
from blocktune.kernels.kernel import AttentionKernel, CompileSpec, SoftmaxCost
from blocktune.kernels.launch import TritonLaunch
from blocktune.kernels.limits import ComputeLimits
from blocktune.kernels.shape import AttentionShape, Causal
from blocktune.kernels.source_hash import hash_of_sources
from blocktune.kernels.specialize import DescriptorArgument, TensorArgument, specialize

ROWS = 64
"""Query rows of a consumer warpgroup: one wgmma."""
WARPS = 4
"""Of a consumer; also what the producer takes: one warp that copies, and three idle ones up to a whole warpgroup."""
LENGTH_DIVISOR = 128
REGISTERS = {2: (240, 24), 3: (160, 32), 4: (112, 32)}
"""Registers a thread of the consumers and of the producer, by the number of consumers: they share 65,536."""
SMS = 132
"""Blocks of a persistent launch where no GPU can be asked."""
SIZES = ("seqlen_q", "seqlen_k", "num_heads", "group_size", "batch_heads", "head_group")
PLACES = tuple(f"{tensor}_{part}" for tensor in "qkvo" for part in ("row_b", "row_h", "col_h"))
"""Where a head lies in a tensor's plane: row = batch * row_b + head * row_h + position, column = head * col_h."""


@gluon.jit(do_not_specialize=[*SIZES, *PLACES])
def flash_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, counter, scale_log2,
    q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, v_row_b, v_row_h, v_col_h, o_row_b, o_row_h, o_col_h,
    seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr,
    SPLIT_RELEASE: gl.constexpr, EARLY_P: gl.constexpr, KEEP_P: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Descriptors of the planes of q, k, v and the output with blocks of 64 (q, output) or BLOCK_N rows (k, v); lse
    [batch, num_heads, seqlen_q] or None; counter: two int32 zeros, and zeros again at the end. scale_log2: the softmax
    scale times log2(e).
    """
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[1]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, D], o_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)  # without SPLIT_RELEASE: of the whole slot
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    tile_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    # run-time arguments only: a constexpr put into a tuple becomes a tensor
    rows = (
        o_desc, lse, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, full, k_empty, v_empty, tile_smem, tile_full,
        tile_empty, scale_log2, seqlen_q, seqlen_k, num_heads, batch_heads, head_group, o_row_b, o_row_h, o_col_h,
    )  # fmt: skip
    copies = (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, full, k_empty, v_empty, tile_smem, tile_full,
        tile_empty, counter, seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group,
        q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, v_row_b, v_row_h, v_col_h,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (rows, 0, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (consumer, (rows, 1, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (producer, (copies, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consumer, (rows, 0, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (consumer, (rows, 1, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (consumer, (rows, 2, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (producer, (copies, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize([
            (consumer, (rows, 0, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (consumer, (rows, 1, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (consumer, (rows, 2, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (consumer, (rows, 3, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE, EARLY_P, KEEP_P)),
            (producer, (copies, BLOCK_N, STAGES, CONSUMERS, CAUSAL, SPLIT_RELEASE)),
        ], [4, 4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip


class FlashForwardHopper(AttentionKernel):
    """The warp-specialised forward kernel of Hopper. block_m counts the rows of all consumers."""

    name = "flash_fwd_hopper"
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (128, 192, 256),
        "block_n": (64, 128),
        "num_warps": (4,),
        "num_stages": (2, 3, 4),
        "split_release": (0, 1),
        "early_p": (0, 1),
        "keep_p": (0, 1),
    }

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if limits.cc != (9, 0):
            return f"{self.name} is made of wgmma (compute capability 9.0 alone), but got {limits.name}"
        if shape.element_bytes != 2:
            return f"{self.name} computes float16 and bfloat16, but got {shape.dtype}"
        if shape.head_dim not in (64, 128) or shape.head_dim_v != shape.head_dim:
            return (
                f"`head_dim == head_dim_v`, 64 or 128, must hold for {self.name}, but got (head_dim={shape.head_dim}, "
                f"head_dim_v={shape.head_dim_v})"
            )
        if shape.seqlen_q % LENGTH_DIVISOR or shape.seqlen_k % LENGTH_DIVISOR:
            return (
                f"`seqlen % {LENGTH_DIVISOR} == 0` must hold for {self.name}, but got (seqlen_q={shape.seqlen_q}, "
                f"seqlen_k={shape.seqlen_k})"
            )
        if shape.causal is not Causal.NONE and shape.seqlen_q != shape.seqlen_k:
            return f"{self.name} is causal for equal lengths only, but got {shape.seqlen_q} and {shape.seqlen_k}"
        return None

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Q and the output of all consumers and the slots of K and V; barriers take another half KiB."""
        row_bytes = shape.head_dim * shape.element_bytes
        return 2 * config.block_m * row_bytes + 2 * config.num_stages * config.block_n * row_bytes

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """What was best on an H200 over lengths from 512 to 16384."""
        if shape.head_dim == 128:
            block_m, block_n, stages, split, early, keep = 128, 128, 2, 1, 0, 1
        elif shape.seqlen_k <= (4096 if shape.causal is not Causal.NONE else 2048):
            block_m, block_n, stages, split, early, keep = 256, 64, 4, 0, 1, 0
        else:
            block_m, block_n, stages, split, early, keep = 192, 128, 4, 0, 1, int(shape.causal is Causal.NONE)
        values = (block_m, block_n, 4, stages, split, early, keep)
        return KernelConfig.of(self.name, dict(zip(self.parameters, values, strict=True)))

    def total_warps(self, config: KernelConfig) -> int:
        return WARPS * (config.block_m // ROWS) + WARPS

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return SoftmaxCost(rescales=False, products_overlap=True, copying_warps=WARPS, persistent=True)

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            if tensor.data_ptr() % 16 or _plane(tensor) is None:
                return f"{name} must be dense, by head or by position, at an address that 16 divides, for {self.name}"
        return super().layout_problem(q, k, v)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_hopper_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        query = DescriptorArgument(shape.dtype, (ROWS, shape.head_dim), swizzled=True)
        key = DescriptorArgument(shape.dtype, (config.block_n, shape.head_dim), swizzled=True)
        arguments: dict[str, Any] = {"q_desc": query, "k_desc": key, "v_desc": key, "o_desc": query, "lse": None}
        arguments |= {"counter": TensorArgument("int32"), "scale_log2": 1.0} | dict.fromkeys(PLACES, 0)
        arguments |= self._sizes(shape) | self._constants(config, shape)
        return specialize(flash_fwd_hopper_kernel, arguments, {"num_warps": 4})

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        tiles = -(-shape.seqlen_q // config.block_m) * shape.batch * shape.num_heads
        fixed = (*self._sizes(shape).values(), *self._constants(config, shape).values())
        return TritonLaunch(
            flash_fwd_hopper_kernel,
            (min(_multiprocessors(), tiles), 1, 1),
            _leading,
            partial(_trailing, fixed),
            {"num_warps": 4},
            tuple((slot, partial(_describe, rows)) for slot, rows in enumerate((ROWS, *[config.block_n] * 2, ROWS))),
        )

    def _sizes(self, shape: AttentionShape) -> dict[str, int]:
        heads = shape.batch * shape.num_heads
        values = (shape.seqlen_q, shape.seqlen_k, shape.num_heads, shape.group_size, heads, heads_per_group(shape))
        return dict(zip(SIZES, values, strict=True))

    def _constants(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        consumers, own = config.block_m // ROWS, config.parameters
        consumer_regs, producer_regs = REGISTERS[consumers]
        return {
            "BLOCK_N": config.block_n,
            "STAGES": config.num_stages,
            "CONSUMERS": consumers,
            "CAUSAL": shape.causal is not Causal.NONE,
            "SPLIT_RELEASE": bool(own["split_release"]),
            "EARLY_P": bool(own["early_p"]),
            "KEEP_P": bool(own["keep_p"]),
            "CONSUMER_REGS": consumer_regs,
            "PRODUCER_REGS": producer_regs,
        }


@functools.cache
def _multiprocessors() -> int:
    import torch

    if not torch.cuda.is_available():
        return SMS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _plane(tensor: Any) -> tuple[list[int], tuple[int, int, int]] | None:
    """A dense [batch, heads, length, head_dim] tensor as a matrix: its sizes, and (row_b, row_h, col_h).

    By head in memory: a row is a position of a head. By position: a row holds all heads of a position. None otherwise.
    """
    batch, heads, length, dim = tensor.shape
    strides = tensor.stride()
    if strides == (heads * length * dim, length * dim, dim, 1):
        return [batch * heads * length, dim], (heads * length, length, 0)
    if strides == (length * heads * dim, dim, heads * dim, 1):
        return [batch * length, heads * dim], (length, 0, dim)
    return None


@functools.cache
def _layout(rows: int, dim: int, dtype: Any) -> Any:
    import torch

    return gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16 if dtype is torch.bfloat16 else gl.float16)


def _describe(rows: int, tensor: Any) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    plane = _plane(tensor)
    if plane is None:
        raise ValueError(f"A tensor must be dense, by head or by position, but got strides {tensor.stride()}.")
    made = TensorDescriptor.__new__(TensorDescriptor)  # without its checks: `layout_problem` was asked
    dim = tensor.shape[-1]
    made.base, made.shape, made.strides, made.block_shape = tensor, plane[0], [plane[0][1], 1], [rows, dim]
    made.layout = _layout(rows, dim, tensor.dtype)
    return made


_counters: dict[tuple[int, int], Any] = {}


def _counter(device: Any) -> Any:
    """Two zeros for one launch. Launches of a stream follow each other and leave zeros, so they share a pair; a CUDA
    graph may run beside its stream and gets a pair of its own."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return found


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    return q, k, v, out, lse, _counter(q.device), scale * LOG2_E


def _trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    places = [place for tensor in (q, k, v, out) if (plane := _plane(tensor)) is not None for place in plane[1]]
    return *places, *fixed
