"""What a thread of the 8-bit Hopper forward knows of its rows: device functions of kernels/hopper_fp8_steps.py.

A thread of a warpgroup has two rows of 64, r and r + 8, and three others have the same. Numbers of rows stand here as
[64, 4], one for each of these threads: the running maximum and what follows from it four times the same, and what each
thread makes of its own columns. Nothing of it leaves its thread but where the maximum is raised, which is rare.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators


@gluon.jit
def by_thread(x):
    """[64, N] of an accumulator as [64, N / 8, 4, 2]: behind the rows the third dimension counts their threads."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def as_rows(x, numbers):
    """[64, 4] in the layout that `thread_sum` gives; no data moves."""
    PAIRS: gl.constexpr = gl.SliceLayout(1, numbers.type.layout)
    return gl.convert_layout(x, gl.SliceLayout(2, PAIRS))


@gluon.jit
def thread_max(x):
    """[64, N / 8, 4, 2] to [64, 4], in four independent chains a row."""
    chains = gl.max(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, 4, 2]), 2)
    return as_rows(gl.max(gl.max(chains, 1), 2), x)


@gluon.jit
def thread_sum(x):
    """[64, N / 8, 4, 2] to [64, 4]; the four threads of a row are added once a tile."""
    return gl.sum(gl.sum(x, 1), 2)


@gluon.jit
def beside(x, numbers):
    """[64, 4] as [64, 1, 4, 1], as it is wanted beside numbers [64, N / 8, 4, 2]; no data moves."""
    return gl.expand_dims(gl.expand_dims(as_rows(x, numbers), 2), 1)


@gluon.jit
def across(x, acc, O_L: gl.constexpr):
    """[64, 4] as [64, WIDTH], as an accumulator has it; no data moves."""
    numbers = by_thread(acc)
    wide, _ = gl.broadcast(beside(x, numbers), numbers)
    return gl.convert_layout(gl.reshape(wide, [acc.shape[0], acc.shape[1]]), O_L)


@gluon.constexpr_function
def raise_asm(shift, tau):
    """Assembly for the two rows of a thread: `raised`, skipped by a warp that has nothing to raise.

    Operands: bases and factors as results (0 to 3) and as arguments, the maxima of the new scores (8, 9) and their
    scale (10).
    """
    head = ["{", ".reg .pred p, q;", ".reg .f32 other, high, low, above;"]
    for row in range(2):
        head += [f"neg.f32 low, ${row};", f"fma.rn.f32 above, ${8 + row}, $10, low;"]
        head += [f"setp.gt.f32 {'pq'[row]}, above, {float(shift + tau)};"]
    head += ["or.pred p, p, q;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra SKIP;"]
    body = []
    for row in range(2):
        body += [f"mov.f32 high, ${8 + row};"]
        for lanes in (2, 1):
            body += [f"shfl.sync.bfly.b32 other, high, {lanes}, 0x1f, 0xffffffff;", "max.f32 high, high, other;"]
        body += [f"neg.f32 low, ${row};", "fma.rn.f32 above, high, $10, low;"]
        body += [f"setp.gt.f32 p, above, {float(shift + tau)};", f"sub.f32 above, {float(shift)}, above;"]
        body += [f"fma.rn.f32 high, high, $10, {float(-shift)};", f"@p mov.f32 ${row}, high;"]
        body += ["ex2.approx.ftz.f32 above, above;", f"@p mov.f32 ${2 + row}, above;"]
    return "\n".join([*head, *body, "SKIP:", "}"])


@gluon.jit
def raised(base, found, scale):
    """What is subtracted from the scaled scores of rows [64, 4] from this block of keys on, and the factor of what was
    summed up before.

    found: `thread_max` of the block's scores, which are scaled here. A base is SHIFT less than the running maximum when
    it was raised, and the maximum may have grown by TAU before it is raised again. So most warps only compare: they
    exchange no numbers, and no exponential waits for an exchange.
    """
    ASM: gl.constexpr = raise_asm(4, 4)
    return gl.inline_asm_elementwise(
        ASM,
        "=f,=f,=f,=f,0,1,2,3,f,f,f,f",
        [base, 1.0, found, scale],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=2,
    )
