"""Rows of a head in a tensor that has a descriptor, packed or not, in Gluon: what a copy moves of them."""

from typing import Any, NamedTuple

from triton.experimental import gluon

from blocktune.kernels.hopper.common.device_functions import as_block, copy_in, copy_out


class HeadRows(NamedTuple):
    """The rows of a head of a sequence in a tensor that has a descriptor.

    begin: the sequence's first token among packed ones, whose descriptor has five dimensions. length: its rows.
    """

    desc: Any
    batch: Any
    head: Any
    begin: Any
    length: Any


@gluon.jit
def load_panel(rows, row, column, barrier, tile):
    """Copy a head's rows from `row` and columns from `column` on to a tile of shared memory; zeros beyond the end.

    The end of a packed sequence is inside the tensor. Its descriptor (`describe_packed` in
    kernels/hopper/common/descriptors.py) has a dimension of 2^30 rows that ends where the sequence ends, so that the
    copy engine clips there, too.
    """
    desc = rows.desc
    block = as_block(desc, tile)
    if len(desc.block_type.shape) == 4:
        copy_in(desc, [rows.batch, rows.head, row, column], barrier, block)
    else:
        end = rows.begin + rows.length
        copy_in(desc, [1 << 30, end, rows.head, (1 << 30) - rows.length + row, column], barrier, block)


@gluon.jit
def store_panel(rows, row, column, tile):
    """Copy a tile of shared memory to a head's rows from `row` and columns from `column` on."""
    desc = rows.desc
    if len(desc.block_type.shape) == 4:
        copy_out(desc, [rows.batch, rows.head, row, column], as_block(desc, tile))
    else:
        end = rows.begin + rows.length
        copy_out(desc, [1 << 30, end, rows.head, (1 << 30) - rows.length + row, column], as_block(desc, tile))
