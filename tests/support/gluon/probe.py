"""Asks Triton's compiler for bank conflicts, without a GPU."""

import re
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource


@gluon.jit
def probe(held: gl.constexpr, kept: gl.constexpr):
    gl.static_print(gl.bank_conflicts(held, kept))


def excess(held: Any, kept: Any) -> int:
    """What `bank_conflicts` of a distributed and a shared type is, read off the compiler's static print."""
    source = GluonASTSource(probe, {}, {"held": held, "kept": kept}, {})
    printed = StringIO()
    with redirect_stdout(printed):
        options = {"num_warps": 1, "enable_fp_fusion": True}
        triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    return int(re.findall(r"\d+", printed.getvalue())[-1])
