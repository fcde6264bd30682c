"""The constants of the cost model that no data sheet has: how long things wait, and how well they overlap.

Rates come from the device; these are the same for all devices, in cycles, iterations and shares. They were chosen
within what is physically plausible so that the model ranks recorded sweeps of an H200, and rounded, since the ranking
hardly depends on any of them. `python -m tools.lab.calibrate` fits them again and tests the fit on head
dimensions that were left out (notes/models/search.md has the figures).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConstants:
    """The constants of the cost model; the text below a value says what it is."""

    spilled_iterations: float = 0.4
    """Share of the spilled bytes that is stored and loaded in every key tile; the rest is spilled outside the loop."""

    load_latency_cycles: float = 600.0
    """From the request of a tile to its use when L2 holds it: about 260 cycles when idle on Hopper, more when busy."""

    memory_latency_cycles: float = 1000.0
    """How much longer a tile takes that no block has read before: device memory under load, and the way there."""

    latency_regularity: float = 2.0
    """Exponent by which waiting for a tile dwindles as it is requested earlier, in its mean latency: 1 would be for
    latencies that vary as much as an exponential distribution."""

    held_iterations: float = 0.2
    """How much longer than an iteration a tile keeps its buffer where a product runs on into the next one."""

    iteration_latency_cycles: float = 250.0
    """Waiting of a warpgroup in every key tile that uses no unit: starting and draining two matrix products (about 60
    each), two reductions across four lanes (two shuffles each, about 30 a shuffle), and the barrier of the pipeline."""

    row_operations: float = 140.0
    """Of a row in every key tile: maximum and sum across the four lanes that share it (four shuffles, each of which
    takes the place of four operations), new factor and old sum, all of it in all four."""

    softmax_overlap: float = 1.6
    """Exponent by which exponentials and the other arithmetic of the softmax are joined. They have units of their own,
    but one thread issues them in turn, and warps that share a scheduler reach their softmax together: nearer the sum
    (1) than the maximum."""

    cross_warp_cycles: float = 500.0
    """More waiting where the scores of a row lie in several warps: two reductions through shared memory, a barrier."""

    second_warpgroup: float = 0.3
    """What a further warpgroup of the same block adds to the overlap, as a share of an independent one: both wait at a
    barrier in every key tile, so that they drift apart within a tile only."""

    block_start_cycles: float = 5500.0
    """What a block takes besides its iterations: its launch, the way of queries and first keys from device memory, one
    after the other, and its output's way back."""

    next_tile_cycles: float = 600.0
    """The same where the warps that copy fetch the next queries and keys while the last ones are computed with."""

    uneven_end: float = 1.0
    """Blocks of mean length that causal blocks leave uneven at the end, although the longest start first."""

    launch_us: float = 3.0
    """From the event before a launch to its first block, and from the last one to the event after it."""

    next_launch_us: float = 2.0
    """A launch before or after the longest one, besides what it moves."""

    merge_us: float = 7.0
    """A second launch, which waits for the first and merges what its blocks found out about shares of the keys."""

    overlapped_merge_us: float = 5.5
    """The same where it is launched early and only waits for the first one's last block."""

    inner_merge_us: float = 3.0
    """The same without a launch: blocks count themselves in memory, and the last one of a head merges."""

    memory_share: float = 0.92
    """What device memory delivers of its rate: the rest goes to refreshing and to turning from reads to writes."""

    sustained_clock: float = 0.9
    """Clock under this load over that of the advertised matrix rate: an H200 at its power limit holds 1.54 to 1.75 GHz
    of 1.83 in attention."""

    burstiness: float = 2.0
    """Exponent by which times of comparable size that overlap are joined: neither comes evenly, so that they wait for
    each other; 1 would be the sum, infinity the maximum."""


CONSTANTS = CostConstants()
