"""Whoever computes a problem: blocktune, PyTorch's back ends, and FlashAttention-3 and -4 where they are installed."""

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.runtime.api.flash_attn import flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache
from blocktune.tuner.compare.flash_peers import FLASH_PEERS, OWN_SPLITS
from blocktune.tuner.compare.report import FEW_QUERIES
from tools.bench.drawn_peers.problem import Attend, Problem, Run

OURS, CUDNN, FA2, FA3, FA4 = "ours", "cudnn", "fa2", "fa3", "fa4"
PYTORCH = "pytorch"
"""Whatever PyTorch chooses by itself."""

OTHERS = (FA2, CUDNN, FA3, FA4)
"""Peers; the first that computes a problem is what results are compared with."""

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # FlashAttention-4 reads it when it is imported

CALLS_BEFORE = 3
"""Calls after which ours repeats what it has recorded."""


def missing_reason(name: str) -> str | None:
    """Return why a peer cannot be had at all; None where it can."""
    try:
        if name in FLASH_PEERS:
            _module(name)
    except UsageError as error:
        return str(error)
    return None


def run_of(name: str, problem: Problem) -> Run:
    """Return what a peer computes of a problem, once compiled.

    Raises:
        UsageError: it is known not to compute such problems.
    """
    return fa4(problem) if name == FA4 else problem.run(ATTENDS[name](problem))


def ours(problem: Problem) -> Attend:
    """Return what calls of blocktune get, which have recorded their launch."""
    shape = problem.shape
    if shape.features.page_size:
        attend: Callable[..., Any] = functools.partial(
            flash_attn_with_kvcache,
            cache_seqlens=problem.filled,
            block_table=problem.table,
            causal=problem.is_causal,
        )
    elif shape.features.varlen:
        attend = functools.partial(flash_attn_varlen_func, causal=problem.is_causal, **_bounds(problem))
    else:
        attend = functools.partial(flash_attn_func, causal=problem.is_causal, window_size=problem.sides)
    for _ in range(CALLS_BEFORE):
        problem.run(attend)()
    return attend


def pytorch(problem: Problem) -> Attend:
    """Return the kernel that PyTorch chooses itself."""
    options = {"is_causal": problem.is_causal, "enable_gqa": problem.shape.group_size > 1}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return scaled_dot_product_attention(*turned, **options).transpose(1, 2)

    return attend


def cudnn(problem: Problem) -> Attend:
    """Return cuDNN through PyTorch."""
    shape = problem.shape
    if shape.features or shape.causal_offset:
        raise UsageError("PyTorch asks cuDNN for no windows, packed sequences, pages or masks from the lower right.")
    chosen = pytorch(problem)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return chosen(query, key, value)

    return attend


def fa2(problem: Problem) -> Attend:
    """Return FlashAttention-2 as PyTorch has it, by the operator that `scaled_dot_product_attention` and `varlen_attn`
    end in: it takes windows and masks from the lower right too."""
    shape, longest = problem.shape, (problem.shape.seqlen_q, problem.shape.seqlen_k)
    begins: tuple[Tensor | None, Tensor | None] = (problem.begins, problem.begins)
    options: dict[str, Any] = {"scale": problem.scale}
    if shape.features.window:
        options |= dict(zip(("window_size_left", "window_size_right"), problem.sides, strict=True))
    if shape.features.page_size:
        begins = _begins_of_queries(problem), None
        options |= {"seqused_k": problem.filled, "block_table": problem.table}
    forward = torch.ops.aten._flash_attention_forward

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = query.flatten(0, 1) if shape.features.page_size else query
        found = forward(rows, key, value, *begins, *longest, 0.0, problem.is_causal, False, **options)
        return found[0].view(query.shape)

    return attend


def fa3(problem: Problem) -> Attend:
    """Return FlashAttention-3's forward."""
    if problem.cell.is_backward:
        raise UsageError("FlashAttention-3's backward is timed apart, and of 128 columns alone.")
    shape, module = problem.shape, _module(FA3)
    options: dict[str, Any] = {"causal": problem.is_causal, "softmax_scale": problem.scale}
    if shape.features.page_size:
        paged = {"cache_seqlens": problem.filled, "page_table": problem.table}
        return functools.partial(module.flash_attn_with_kvcache, **options, **paged)
    options |= {"num_splits": OWN_SPLITS} if shape.seqlen_q <= FEW_QUERIES else {}
    if shape.features.varlen:
        return _first(functools.partial(module.flash_attn_varlen_func, **_bounds(problem), **options))
    return _first(functools.partial(module.flash_attn_func, window_size=problem.sides, **options))


def fa4(problem: Problem) -> Run:
    """Return FlashAttention-4, whose kernels are compiled when they are first called.

    Its backward is called without autograd: tensors that are not there have none on a machine without a GPU.
    """
    shape, module, tensors = problem.shape, _module(FA4), (problem.query, problem.key, problem.value)
    common: dict[str, Any] = {"causal": problem.is_causal, "softmax_scale": problem.scale}
    left, right = (None if side == UNLIMITED else side for side in problem.sides)
    if shape.features.page_size:
        paged = {"seqused_k": problem.filled, "page_table": problem.table}
        return problem.run(_first(functools.partial(module.flash_attn_varlen_func, **common, **paged)))
    if shape.features.varlen:
        common |= _bounds(problem)
    function = module.flash_attn_varlen_func if shape.features.varlen else module.flash_attn_func
    forward = functools.partial(function, window_size=(left, right), **common)
    if not problem.cell.is_backward:
        return problem.run(_first(forward))
    out, lse = forward(*tensors, return_lse=True)
    backward = importlib.import_module("flash_attn.cute.interface")._flash_attn_bwd
    given = (*tensors, out, problem.dout, lse)
    return functools.partial(backward, *given, window_size_left=left, window_size_right=right, **common)


ATTENDS: Mapping[str, Callable[[Problem], Attend]] = {OURS: ours, PYTORCH: pytorch, CUDNN: cudnn, FA2: fa2, FA3: fa3}


def _module(name: str) -> Any:
    """Return the module that has the functions of a generation of FlashAttention.

    Raises:
        UsageError: it is not installed, or cannot be imported.
    """
    problems = []
    for module in FLASH_PEERS[name].modules:
        try:
            return importlib.import_module(module)
        except (ImportError, OSError) as error:
            problems.append(f"{module}: {error}")
    raise UsageError(f"{FLASH_PEERS[name].title} cannot be imported: {'; '.join(problems)}")


def _bounds(problem: Problem) -> dict[str, Any]:
    """Return where packed sequences begin, as every generation of FlashAttention takes it."""
    begins = {"cu_seqlens_q": problem.begins, "cu_seqlens_k": problem.begins}
    return begins | {"max_seqlen_q": problem.shape.seqlen_q, "max_seqlen_k": problem.shape.seqlen_k}


def _first(function: Callable[..., Any]) -> Attend:
    """Return a function that returns the output alone."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = function(query, key, value)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output

    return attend


def _begins_of_queries(problem: Problem) -> Tensor:
    """Return where the queries of each entry begin, as packed ones."""
    count = torch.arange(problem.shape.batch + 1, device="cuda", dtype=torch.int32)
    return count * problem.shape.seqlen_q
