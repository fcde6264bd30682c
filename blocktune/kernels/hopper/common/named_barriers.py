"""The hardware's named barriers, in Gluon: device functions.

An arrival does not wait; a sync arrives and waits until THREADS threads have arrived.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def barrier_asm(operation, threads):
    """Return assembly for an operation of a named barrier."""
    return f"bar.{operation} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def bar_arrive(number, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting."""
    ASM: gl.constexpr = barrier_asm("arrive", THREADS)
    return gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bar_sync(number, THREADS: gl.constexpr):
    """Arrive at a named barrier and wait until it is full."""
    ASM: gl.constexpr = barrier_asm("sync", THREADS)
    return gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1)
