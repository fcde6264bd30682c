"""How warps of the Hopper kernels hand memory to each other, in Gluon: slots with two barriers, and the ring of tiles.

A slot is full once its writer has arrived at one barrier (for copies: once their bytes have), and empty again once all
its readers have arrived at the other one. Both sides count along: place and parity of the next slot, which `advance`
moves on. A writer starts with parity 1, for which an unused barrier does not wait, a reader with 0.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.device_functions import advance


class TileRing(NamedTuple):
    """Two places for the number of a tile, from the warp that fetches it to the warpgroups that compute it."""

    numbers: Any
    full: Any
    empty: Any


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    """Memory for COUNT barriers."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def open_slot(full, empty, place, READERS: gl.constexpr):
    """Sets up both barriers of a slot that one writer fills and READERS warps or warpgroups give back."""
    mbarrier.init(full.index(place), count=1)
    mbarrier.init(empty.index(place), count=READERS)


@gluon.jit
def new_tile_numbers():
    """Memory for the numbers of a ring."""
    return gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def new_tile_ring(numbers):
    """A ring of these numbers, whose slots are still to be opened."""
    return TileRing(numbers=numbers, full=new_barriers(2), empty=new_barriers(2))


@gluon.jit
def publish(tile, ring, place, parity):
    """Hands the number of a tile to the warpgroups that compute. Returns (place, parity) of the next one."""
    mbarrier.wait(ring.empty.index(place), parity)
    ring.numbers.index(place).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(ring.full.index(place), count=1)
    return advance(place, parity, 2)


@gluon.jit
def fetch(counter, ring, place, parity):
    """Takes the next tile from the counter and hands its number on. Returns it, and (place, parity) of the next one.

    Tiles of one length can be fetched one ahead. A tile of another length is fetched when the copies of the one before
    have been issued, no earlier: a block that took it at the start of a long tile would keep it from one that has
    nothing left to do.
    """
    tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    place, parity = publish(tile, ring, place, parity)
    return tile, place, parity


@gluon.jit
def receive(ring, place, parity):
    """Waits for the number of a tile, with any number of warps. Returns it, and (place, parity) of the next one."""
    WARPS: gl.constexpr = gl.num_warps()
    mbarrier.wait(ring.full.index(place), parity)
    tile = ring.numbers.index(place).load(gl.BlockedLayout([1], [32], [WARPS], [0])).item()
    mbarrier.arrive(ring.empty.index(place), count=1)
    place, parity = advance(place, parity, 2)
    return tile, place, parity
