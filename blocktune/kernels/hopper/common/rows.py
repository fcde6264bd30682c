"""What a thread of a warpgroup knows of its rows, in Gluon: device functions.

A thread of a warpgroup has two rows of 64, r and r + 8, and three others have the same. Numbers of rows stand here as
[64, 4], one for each of these threads: the running maximum and what follows from it four times the same, and what each
thread makes of its own columns. Nothing of it leaves its thread but where the maximum is raised, which is rare.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.device_functions import rescale_asm, rescale_constraints


@gluon.jit
def by_thread(x):
    """Return [64, N] of an accumulator as [64, N / 8, 4, 2]: behind the rows the third dimension counts their
    threads."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def as_rows(x, numbers):
    """Return [64, 4] in the layout that `thread_sum` gives; no data moves."""
    PAIRS: gl.constexpr = gl.SliceLayout(1, numbers.type.layout)
    return gl.convert_layout(x, gl.SliceLayout(2, PAIRS))


@gluon.jit
def thread_sum(x):
    """Add up [64, N / 8, 4, 2] to [64, 4]; the four threads of a row are added once a tile."""
    return gl.sum(gl.sum(x, 1), 2)


@gluon.jit
def broadcast_rows(x, numbers):
    """Broadcast row values [64, 4] against scores [64, N / 8, 4, 2], as [64, 1, 4, 1]; no data moves."""
    return gl.expand_dims(gl.expand_dims(as_rows(x, numbers), 2), 1)


@gluon.jit
def across(x, acc, O_L: gl.constexpr):
    """Return [64, 4] as [64, WIDTH], as an accumulator has it; no data moves."""
    # [64, WIDTH / 8, 4, 2]
    numbers = by_thread(acc)
    wide, _ = gl.broadcast(broadcast_rows(x, numbers), numbers)
    return gl.convert_layout(gl.reshape(wide, [acc.shape[0], acc.shape[1]]), O_L)


@gluon.constexpr_function
def extreme_asm(operation, goal, sources):
    """Return assembly for the extreme of registers in `goal`, in two chains. operation: max or min, with the type that
    the registers are compared as."""
    half = len(sources) // 2
    lines = [f"{operation} {goal}, {sources[0]}, {sources[1]};"]
    lines += [f"{operation} {goal}b, {sources[half]}, {sources[half + 1]};"]
    for i in range(2, half):
        lines += [f"{operation} {goal}, {goal}, {sources[i]};", f"{operation} {goal}b, {goal}b, {sources[half + i]};"]
    return [*lines, f"{operation} {goal}, {goal}, {goal}b;"]


@gluon.jit
def first_of(a, b):
    """Return the first of two numbers."""
    return a


@gluon.jit
def of_threads(x):
    """Return [64, N / 8, 4, 2] with one number in all places of a thread's row, as [64, 4]."""
    return gl.reduce(gl.reduce(x, 1, first_of), 2, first_of)


@gluon.jit
def times_factor(acc, factor, O_L: gl.constexpr):
    """Return the accumulator [64, WIDTH] times the factors of its rows [64, 4]."""
    PER_THREAD: gl.constexpr = acc.shape[1] // 2
    ASM: gl.constexpr = rescale_asm(PER_THREAD)
    CONSTRAINTS: gl.constexpr = rescale_constraints(PER_THREAD)
    # [64, WIDTH]
    factors = across(factor, acc, O_L)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, factors], dtype=gl.float32, is_pure=False, pack=PER_THREAD)
