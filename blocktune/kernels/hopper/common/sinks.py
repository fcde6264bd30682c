"""Attention sinks where a row's softmax ends, in Gluon: device functions.

A sink is a logit of a head that joins the sum of probabilities and has no value. Here it is in units of log2, as the
maxima and sums of the kernels are: next to sum 2^(score - maximum) it counts as 2^(sink - maximum).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sink_of(sinks, head):
    """The sink of a head, or of every row's head."""
    LOG2_E: gl.constexpr = 1.4426950408889634
    return gl.load(sinks + head).to(gl.float32) * LOG2_E


@gluon.jit
def sum_with_sink(total, maximum, sink):
    """The sums of rows that their sink has joined: 0 where a row sees no key, and inf where next to the sink nothing is
    left of the keys."""
    return gl.where(total == 0.0, 0.0, total + gl.exp2(sink - maximum))


@gluon.jit
def log2_with_sink(log2_sum, total, sink):
    """The logarithm of everything in a row, given that of `sum_with_sink` and this sum itself."""
    return gl.where(total == 0.0, sink, gl.where(total == float("inf"), sink, log2_sum))
