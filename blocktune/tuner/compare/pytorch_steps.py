"""The steps of the ladder that PyTorch computes: standard attention, chunked attention, its memory-efficient kernel.

Chunks are those of Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", arXiv 2112.05682, without gradients.
"""

import functools
import math
from typing import Any

import torch

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.compare.ladder_ideas import EFFICIENT, IDEAS, PYTORCH, STANDARD
from blocktune.tuner.compare.ladder_steps import LadderStep
from blocktune.tuner.compare.peers import Compute, for_question, sdpa_forward, standard_compute
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion
from blocktune.tuner.correctness.forward import softmax_scale

QUERY_CHUNK, KEY_CHUNK = 1024, 4096
"""Rows of a piece, as the paper's code has them."""


def pytorch_steps(direction: Direction, *, measured: bool) -> tuple[LadderStep, ...]:
    """Return the steps of a direction; those without a model have a reason where nothing is measured."""
    reason = "" if measured else "PyTorch's code is measured on a GPU, no model predicts it"
    names = (name for name in PYTORCH if name in IDEAS[direction])
    return tuple(LadderStep(name=name, problem="" if name == STANDARD else reason) for name in names)


def pytorch_compute(name: str, shape: AttentionShape, device: DeviceSpec, question: AnyQuestion) -> Compute:
    """Return the computation of a step; a backward's is that of a forward that ran before.

    Raises:
        UsageError: it does not compute the shape, or not on this device.
    """
    if name == STANDARD:
        return standard_compute(shape, device, question)
    efficient = name == EFFICIENT
    attend = sdpa_forward(shape, "EFFICIENT_ATTENTION") if efficient else functools.partial(chunked_attention, shape)
    return for_question(attend, question)


def chunked_attention(shape: AttentionShape, q: Any, k: Any, v: Any) -> Any:
    """Compute the same piece by piece: each piece of queries merges pieces of keys, in float32.

    Only the scores of a piece are in memory. A query without keys gives 0. Products of 16 bits would round every piece,
    which adds up to more than the check allows.
    """
    k, v = (tensor.repeat_interleave(shape.group_size, dim=1) for tensor in (k, v))
    pieces = [
        _attend_piece(shape, q[:, :, start : start + QUERY_CHUNK], k, v, start)
        for start in range(0, shape.seqlen_q, QUERY_CHUNK)
    ]
    return torch.cat(pieces, dim=2)


def _attend_piece(shape: AttentionShape, q: Any, k: Any, v: Any, first_row: int) -> Any:
    """Return the output for the piece of the queries that begins at this row."""
    most = torch.full((*q.shape[:3], 1), -math.inf, device=q.device)
    weight, total = torch.zeros_like(most), torch.zeros((*q.shape[:3], v.shape[-1]), device=q.device)
    last_row = first_row + q.shape[2] - 1 + shape.causal_offset
    seqlen_k = shape.seqlen_k if shape.causal is Causal.NONE else max(0, min(shape.seqlen_k, last_row + 1))
    for start in range(0, seqlen_k, KEY_CHUNK):
        scores = _scores(shape, q, k[:, :, start : start + KEY_CHUNK], first_row, start)
        new = torch.maximum(most, scores.amax(-1, keepdim=True))
        finite = torch.where(new == -math.inf, 0.0, new)  # a row that has seen no key yet
        exponentials, fade = torch.exp(scores - finite), torch.exp(most - finite)
        weight = weight * fade + exponentials.sum(-1, keepdim=True)
        total = total * fade + exponentials @ v[:, :, start : start + KEY_CHUNK].float()
        most = new
    return torch.where(weight > 0, total / weight, 0.0).to(q.dtype)


def _scores(shape: AttentionShape, q: Any, k: Any, first_row: int, first_key: int) -> Any:
    """Return the scores between two pieces, of queries and keys, -inf where the mask hides a key."""
    scores = (q.float() * softmax_scale(shape)) @ k.float().transpose(-1, -2)
    if shape.causal is not Causal.NONE:
        rows = torch.arange(first_row, first_row + q.shape[2], device=q.device)[:, None] + shape.causal_offset
        scores.masked_fill_(torch.arange(first_key, first_key + k.shape[2], device=q.device) > rows, -math.inf)
    return scores
