"""A kernel that only reads the keys and values of a decoding, in Gluon: what `flash_decode_hopper` cannot go below.

Its blocks are those of the decoding and load the same words in the same order, a tile ahead. Nothing is computed,
shared or merged.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.decode.arguments import Strides
from blocktune.kernels.hopper.decode.strides import word_stride
from blocktune.kernels.hopper.decode.tiles import (
    key_layout,
    key_offsets,
    load_words,
    outer_layout,
    share_of,
    value_layout,
    words_of_head,
)
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape


@gluon.jit
def keep(out, words):
    """Store what no sum of words is, so that the compiler keeps their loads."""
    gl.store(out + gl.zeros_like(words), words, mask=words == 0x7FC1_F00D)


@gluon.jit
def reading_kernel(
    K, V, Out, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, seqlen_k,
    WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """Program (key head, split, batch): reads its share of K [batch, num_heads_kv, seqlen_k, WIDTH] and V of 16 bits.

    Strides are in words of 32 bits. Out int32 [1]: written by a word whose sum with those of all tiles is one number
    of 2^32."""
    W: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = BLOCK_N // W
    K_L: gl.constexpr = key_layout(W)
    V_L: gl.constexpr = value_layout(W)
    K_ROWS: gl.constexpr = outer_layout(K_L)
    V_ROWS: gl.constexpr = outer_layout(V_L)
    batch = gl.program_id(2).to(gl.int64)
    k_strides = Strides(stride_kb, stride_kh, stride_kn)
    v_strides = Strides(stride_vb, stride_vh, stride_vn)
    k_base = words_of_head(K, batch, gl.program_id(0), k_strides, 0)
    v_base = words_of_head(V, batch, gl.program_id(0), v_strides, 0)
    share = share_of(seqlen_k, BLOCK_N, SPLITS)
    first, stop = share.first, share.stop
    # [W, KEYS, WIDTH / 32, 4, 4], [W, KEYS, WIDTH_V / 64, 8, 4]
    k = gl.zeros([W, KEYS, WIDTH // 32, 4, 4], gl.int32, K_L)
    v = gl.zeros([W, KEYS, WIDTH_V // 64, 8, 4], gl.int32, V_L)
    k_sum, v_sum = k, v
    if first < stop:
        k_offsets = key_offsets(first, seqlen_k, 0, k_strides, 0, W, KEYS, K_ROWS)
        v_offsets = key_offsets(first, seqlen_k, 0, v_strides, 0, W, KEYS, V_ROWS)
        k = load_words(k_base, k_offsets, WIDTH, WIDTH // 32, STREAM, K_L)
        v = load_words(v_base, v_offsets, WIDTH_V, WIDTH_V // 64, STREAM, V_L)
    for tile in range(first, stop):
        k_sum += k
        if tile + 1 < stop:
            k_offsets = key_offsets(tile + 1, seqlen_k, 0, k_strides, 0, W, KEYS, K_ROWS)
            k = load_words(k_base, k_offsets, WIDTH, WIDTH // 32, STREAM, K_L)
        v_sum += v
        if tile + 1 < stop:
            v_offsets = key_offsets(tile + 1, seqlen_k, 0, v_strides, 0, W, KEYS, V_ROWS)
            v = load_words(v_base, v_offsets, WIDTH_V, WIDTH_V // 64, STREAM, V_L)
    keep(Out, k_sum)
    keep(Out, v_sum)


def reading(shape: AttentionShape, config: KernelConfig, k: Any, v: Any) -> Callable[[], None]:
    """Return a launch that reads k and v in the tiles and shares of a config of `flash_decode_hopper`."""
    splits, stream = config.parameters["splits"], bool(config.parameters["stream"])
    out = torch.zeros(1, dtype=torch.int32, device=k.device)
    strides = (word_stride(tensor, axis) for tensor in (k, v) for axis in range(3))
    sizes = shape.seqlen_k, shape.head_dim, shape.head_dim_v, config.block_n, splits, stream
    arguments = (k, v, out, *strides, *sizes)
    grid = (shape.num_heads_kv, splits, shape.batch)
    return functools.partial(reading_kernel[grid], *arguments, num_warps=config.num_warps)
