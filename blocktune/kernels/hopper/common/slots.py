"""How warps of the Hopper kernels hand memory to each other, in Gluon: slots with two barriers, and the ring of tiles.

A slot is full once its writer has arrived at one barrier (for copies: once their bytes have), and empty again once all
its readers have arrived at the other one. Both sides count along: place and parity of the next slot, which `advance`
moves on. A writer starts with parity 1, for which an unused barrier does not wait, a reader with 0.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Slot(NamedTuple):
    """A slot of a ring, and the parity of the phase that its barrier is waited for."""

    place: Any
    parity: Any


class TileRing(NamedTuple):
    """Two places for the number of a tile, from the warp that fetches it to the warpgroups that compute it."""

    numbers: Any
    full: Any
    empty: Any


@gluon.jit
def first_slot(PARITY: gl.constexpr):
    """Return the first slot of a ring, for a writer (PARITY 1) or a reader (0)."""
    return Slot(place=gl.to_tensor(0), parity=gl.to_tensor(PARITY))


@gluon.jit
def next_slot(slot, COUNT: gl.constexpr):
    """Return the slot after this one in a ring of COUNT."""
    place = slot.place + 1
    parity = slot.parity
    if place == COUNT:
        place = 0
        parity ^= 1
    return Slot(place=place, parity=parity)


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    """Allocate memory for COUNT barriers."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def open_slot(full, empty, place, READERS: gl.constexpr):
    """Set up both barriers of a slot that one writer fills and READERS warps or warpgroups give back."""
    mbarrier.init(full.index(place), count=1)
    mbarrier.init(empty.index(place), count=READERS)


@gluon.jit
def new_tile_numbers():
    """Allocate memory for the numbers of a ring."""
    return gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def new_tile_ring(numbers):
    """Return a ring of these numbers, whose slots are still to be opened."""
    return TileRing(numbers=numbers, full=new_barriers(2), empty=new_barriers(2))


@gluon.jit
def publish(tile, ring, slot):
    """Hand the number of a tile to the warpgroups that compute, and return the ring's next slot."""
    mbarrier.wait(ring.empty.index(slot.place), slot.parity)
    ring.numbers.index(slot.place).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(ring.full.index(slot.place), count=1)
    return next_slot(slot, 2)


@gluon.jit
def fetch(counter, ring, slot):
    """Take the next tile from the counter and hand its number on. Return it and the ring's next slot.

    Tiles of one length can be fetched one ahead. A tile of another length is fetched when the copies of the one before
    have been issued, no earlier: a block that took it at the start of a long tile would keep it from one that has
    nothing left to do.
    """
    tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    return tile, publish(tile, ring, slot)


@gluon.jit
def receive(ring, slot):
    """Wait for the number of a tile, with any number of warps. Return it and the ring's next slot."""
    WARPS: gl.constexpr = gl.num_warps()
    mbarrier.wait(ring.full.index(slot.place), slot.parity)
    tile = ring.numbers.index(slot.place).load(gl.BlockedLayout([1], [32], [WARPS], [0])).item()
    mbarrier.arrive(ring.empty.index(slot.place), count=1)
    return tile, next_slot(slot, 2)
