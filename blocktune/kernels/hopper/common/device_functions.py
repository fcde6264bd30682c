"""What the Hopper kernels have in common, and the row arithmetic of the forward, in Gluon: device functions."""

from math import prod

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr as unwrap
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 renamed the copies.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def reduce_add(desc, coord, src, _semantic=None):
    """Add a tile of shared memory to global memory, as `tma.async_atomic_add` of Triton 3.9."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


# Triton 3.6 compiles the instruction, but has no function for it.
add_out = getattr(tma, "async_atomic_add", None) or reduce_add


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """View the beginning of shared memory as another tile; the method was private before Triton 3.9."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    sizes = [int(unwrap(size)) for size in shape]
    bits = prod(sizes) * unwrap(dtype).primitive_bitwidth
    tiles = prod(memory.shape) * memory.dtype.primitive_bitwidth // bits
    if tiles <= 1:
        return method(dtype, sizes, layout, _semantic=_semantic)
    # Triton 3.8 refuses a view that is smaller than the memory.
    return method(dtype, [tiles, *sizes], layout, _semantic=_semantic).index(0, _semantic=_semantic)


@gluon.jit
def as_block(desc, memory):
    """Return a tile [rows, head_dim] of shared memory as the block [1, 1, rows, head_dim] of a descriptor."""
    return reinterpret(memory, memory.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def pin(x):
    """Hold float32 x, which no instruction uses: nothing that depends on the result is moved above this point."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def tanh(x):
    """Return tanh(x) by one special function; its relative error is at most 2^-11."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def rescale_asm(count):
    """Return assembly for `count` accumulator registers times their row's factor, skipped by a warp whose factors are
    all 1.

    Registers alternate two of row r and two of row r + 8, so operands 2 count and 2 count + 2 are a thread's factors.
    """
    head = ["{", ".reg .pred p, q;"]
    head += [f"setp.neu.f32 p, ${2 * count}, 0f3F800000;", f"setp.neu.f32 q, ${2 * count + 2}, 0f3F800000;"]
    head += ["or.pred p, p, q;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra SKIP;"]
    return "\n".join([*head, *(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)), "SKIP:", "}"])


@gluon.constexpr_function
def rescale_constraints(count):
    """Return the constraints of `rescale_asm`."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """Return the slot after this one, and the parity of its phase."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def locate(tile, q_tiles, head_group, batch_heads, CAUSAL: gl.constexpr):
    """Return (query tile, batch * num_heads + head). Causal: the longest first, inside a group of heads."""
    if CAUSAL:
        per_group = q_tiles * head_group
        first_head = tile // per_group * head_group
        heads_here = gl.minimum(batch_heads - first_head, head_group)
        rest = tile % per_group
        return q_tiles - 1 - rest // heads_here, first_head + rest % heads_here
    else:
        return tile % q_tiles, tile // q_tiles


@gluon.jit
def in_register_order(dq):
    """Return [64, N] as [N, 64], four values of a thread side by side: no data moves."""
    HALF: gl.constexpr = dq.shape[1]
    x = gl.reshape(dq, [4, 2, 8, HALF // 8, 4, 2])  # warp | + 8 rows | lane / 4 | column / 8 | lane % 4 | pair
    return gl.reshape(gl.permute(x, (3, 0, 2, 4, 1, 5)), [HALF, 64])
