"""The Hopper backward's own source, run on the CPU with stand-ins for what the GPU does (gluon_machine.py).

Barriers, memory that is given back, turns of a fixed order, masks and which block adds what are the kernel's own;
the launches before and after it are written in PyTorch here.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.backward import launch, layout, parts
from blocktune.kernels.hopper.backward.device_kernel import flash_bwd_hopper_kernel
from blocktune.kernels.hopper.backward.kernel import FlashBackwardHopper
from blocktune.kernels.hopper.backward.layout import (
    BLOCK_M,
    FORM_ARGUMENTS,
    Rows,
    adds_registers,
    bounds_of,
    dq_slots,
    is_deferred,
    is_plain,
    is_wide,
    keys_of_block,
    runs_ahead,
    scale_arguments,
    sums_part,
    width_of,
)
from blocktune.kernels.hopper.backward.wide.device_kernel import flash_bwd_hopper_wide_kernel
from blocktune.kernels.hopper.biases.arguments import NO_MASK, MaskPass, alibi_code, key_biases, turned
from blocktune.kernels.hopper.sparse.kernel import FlashBackwardHopperSparse
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference, visible
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tests.support.attention.feature_cases import extras_of, packed, tensors
from tests.support.attention.laid_masks import laid_out
from tests.support.attention.masked_rows import LOWEST, lse_of_kernels
from tests.support.gluon import machine as gluon_machine

pytestmark = pytest.mark.triton_free

HOPPER = limits_for((9, 0))
KERNEL, SPARSE = FlashBackwardHopper(), FlashBackwardHopperSparse()
NO, UPPER_LEFT, LOWER_RIGHT = Causal
TOLERANCE = 2e-3
"""Relative Frobenius error of float16 probabilities, their gradients and results."""


def shape_of(seqlen_q: int, seqlen_k: int, head_dim: int, features: str = "", **changes: Any) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_heads_kv": 2, "head_dim_v": head_dim, "dtype": "float16"}
    sizes |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim} | changes
    return AttentionShape(**sizes, features=Features.parse(features), direction=Direction.BACKWARD)


def gradients_of(
    problem: AttentionShape, config: KernelConfig, inputs: list[torch.Tensor], extras: Extras, programs: int
) -> list[torch.Tensor]:
    """dq, dk and dv by the kernel, whose programs run together."""
    q, k, v, out, lse, dout = inputs
    rows, scale = Rows.of(problem, q.shape[2]), problem.head_dim**-0.5
    lse_log2, delta = statistics(problem, rows, lse, (out.float() * dout.float()).sum(-1), extras)
    biases = key_biases(problem, extras, laid_by_keys(extras.mask))
    _, scale_log2, cap_in = scale_arguments(problem, scale, extras)
    if runs_ahead(problem, config):
        lse_log2, delta = lse_log2 * launch.start_factor(scale_log2, cap_in), -delta
    sums = torch.zeros(rows.count * width_of(problem))
    turns = torch.zeros(rows.count // BLOCK_M, dtype=torch.int32) if problem.features.deterministic else None
    dk, dv = torch.full_like(k, 7.0), torch.full_like(v, 7.0)
    keys = keys_of_block(problem)
    blocks = ((q, BLOCK_M), (k, keys), (v, keys), (dout, BLOCK_M))
    described = [launch._described(count, problem, tensor) for tensor, count in blocks]
    described.append(launch._described_sums(problem, (sums, rows.count)))
    bound = (SPARSE if extras.block_mask else KERNEL).bind(config, problem)
    of_parts = [torch.full((count,), 7.0, dtype=dtype) for count, dtype in bound._parts_in_workspace()]
    left = (dk, dv) if bound.options.PARTS == 1 else zip(of_parts, bound._part_places(), strict=True)
    described += [bound._describe_gradient()(gradient) for gradient in left]
    described += [launch._described_statistic((values, rows.count)) for values in (lse_log2, delta)]
    form = (rows.of_head, *bounds_of(problem), cap_in, extras.cu_seqlens_q, extras.cu_seqlens_k, turns)
    of_form = [None] * len(FORM_ARGUMENTS) if is_plain(problem) else form
    rest = [*of_form, *bound.listed(extras, q), *biases]
    counter = torch.zeros(1, dtype=torch.int32)
    kernel = flash_bwd_hopper_wide_kernel if is_wide(problem) else flash_bwd_hopper_kernel
    added = sums if adds_registers(problem, bound.options.PERSISTENT) else None
    arguments = [*described, counter, added, scale, scale_log2, *bound.sizes, *rest, bound.options]
    gluon_machine.run(kernel, arguments, programs, together=True)
    if bound.options.PARTS > 1:
        dk, dv = (
            part.float().view(*full.shape[:2], bound.options.PARTS, *full.shape[2:]).sum(2).to(full.dtype)
            for part, full in zip(of_parts, (dk, dv), strict=True)
        )
    return [rows_of(problem, rows, sums, extras).to(q.dtype), dk, dv]


def places(problem: AttentionShape, extras: Extras) -> torch.Tensor:
    """Where the queries lie in the rows of a head of the workspace."""
    if extras.cu_seqlens_q is None:
        return torch.arange(problem.seqlen_q)
    found = []
    for entry, (begin, end) in enumerate(pairwise(extras.cu_seqlens_q.tolist())):
        found.append((begin + entry * BLOCK_M) // BLOCK_M * BLOCK_M + torch.arange(end - begin))
    return torch.cat(found)


def statistics(
    problem: AttentionShape, rows: Rows, lse: torch.Tensor, delta: torch.Tensor, extras: Extras
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-sum-exp in base 2 and row sums as the launch before leaves them: padding, and rows that see no key, have
    1e30 and 0."""
    base_2 = torch.full((rows.count // rows.of_head, rows.of_head), 1e30)
    sums = torch.zeros(base_2.shape)
    lse, delta = lse.reshape(base_2.shape[0], -1), delta.reshape(base_2.shape[0], -1)
    blind, own = lse.isinf(), places(problem, extras)
    base_2[:, own] = torch.where(blind, 1e30, lse / math.log(2))
    sums[:, own] = delta.masked_fill(blind, 0)
    kept_log2 = math.log2(1 - extras.dropout_p)
    if problem.features.dropout:
        base_2, sums = base_2 + kept_log2, sums * (1 - extras.dropout_p)
    if alibi_code(problem) == 1:
        base_2[:, own] += slopes_of_rows(extras) / math.log(2) * (own % BLOCK_M)
    log2_keys = (lse.double() / 2.0**127 + 2) * 4096 - 1 + kept_log2
    masked = (lse < -1e38) & ~blind
    base_2[:, own] = torch.where(masked, -(2.0**52) * (1 + log2_keys / 64), base_2[:, own]).float()
    return base_2.flatten(), sums.flatten()


def slopes_of_rows(extras: Extras) -> torch.Tensor:
    """The slopes of all heads [heads, 1], or of the tokens of packed sequences [heads, tokens]."""
    if extras.cu_seqlens_q is None:
        return extras.alibi_slopes.flatten()[:, None]
    return extras.alibi_slopes.T.repeat_interleave(extras.cu_seqlens_q.diff(), 1)


def laid_by_keys(mask: torch.Tensor | None) -> tuple[Any, ...]:
    """A mask as the launch before lays it out with keys as rows, and where the kernel finds it."""
    if mask is None:
        return None, *NO_MASK.place
    return laid_out(turned(mask)), *MaskPass.of(mask, (None, None), pins=False).place


def rows_of(problem: AttentionShape, rows: Rows, sums: torch.Tensor, extras: Extras) -> torch.Tensor:
    """dq from its sums, which are in the order of the accumulators' registers, by parts."""
    part, width = sums_part(problem), width_of(problem)
    registers = sums.view(-1, part // 8, 4, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6).reshape(-1, 64, part)
    if is_deferred(problem):  # [block, half of the queries, columns, queries]
        blocks = registers.view(-1, 2, 64, part).permute(0, 1, 3, 2).reshape(-1, BLOCK_M, width)
    else:
        blocks = registers.view(-1, width // part, BLOCK_M, part).permute(0, 2, 1, 3).reshape(-1, BLOCK_M, width)
    dq = blocks.reshape(-1, problem.num_heads, rows.of_head, width) * problem.head_dim**-0.5
    return dq[:, :, places(problem, extras), : problem.head_dim]


def mathematics(problem: AttentionShape) -> Features:
    """The features that change the result."""
    return replace(problem.features, deterministic=False)


def expected(problem: AttentionShape, inputs: list[torch.Tensor], extras: Extras) -> list[torch.Tensor]:
    q, k, v = (tensor.double().requires_grad_() for tensor in inputs[:3])
    out, _ = attention_reference(
        q, k, v, causal=problem.causal, dtype=torch.float64, features=mathematics(problem), extras=extras
    )  # fmt: skip
    return list(torch.autograd.grad(out, (q, k, v), inputs[5].double()))


def check(
    problem: AttentionShape,
    programs: int = 3,
    lengths: Sequence[Sequence[int]] = (),
    mask: torch.Tensor | None = None,
    tolerance: float = TOLERANCE,
    **changes: int,
) -> list[torch.Tensor]:
    """Compare the gradients with PyTorch's in float64, and return them. lengths: of packed queries and keys. mask: with
    rows that finite numbers hide."""
    (q, k, v), extras = packed(problem, *lengths) if lengths else (tensors(problem), extras_of(problem))
    extras = extras if mask is None else replace(extras, mask=mask)
    dout = torch.randn(*q.shape[:3], problem.head_dim_v, generator=torch.Generator().manual_seed(2)).half()
    if lengths:
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    options: dict[str, Any] = {"causal": problem.causal, "features": mathematics(problem), "extras": extras}
    out, lse = attention_reference(q, k, v, **options, dtype=torch.float64)
    if mask is not None:
        lse = lse_with_masked_rows(problem, lse, mask)
    inputs = [q, k, v, out.half(), lse.float(), dout]
    default = KERNEL.default_config(problem, HOPPER)
    config = KernelConfig.of(KERNEL.name, dict(default.parameters) | changes)
    assert KERNEL.violations(config, problem, HOPPER) == ()
    found = gradients_of(problem, config, inputs, extras, programs)
    for name, got, wanted in zip(("dq", "dk", "dv"), found, expected(problem, inputs, extras), strict=True):
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < tolerance, f"{name} of {problem.label}: {error:.1e}"
    return found


def lse_with_masked_rows(problem: AttentionShape, lse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A log-sum-exp of float64 as the forward kernels leave it."""
    seen = visible(problem.seqlen_q, problem.seqlen_k, problem.causal, mask.device) & (mask > -math.inf)
    rows = lse_of_kernels(torch.where(seen, mask.double(), -math.inf)).expand(lse.shape)
    return torch.where(lse < LOWEST, rows, lse)


def gradients_under(problem: AttentionShape, mask: torch.Tensor) -> list[torch.Tensor]:
    """dq, dk and dv under an additive mask."""
    extras = replace(extras_of(problem), mask=mask)
    q, k, v = tensors(problem)
    out, lse = attention_reference(q, k, v, causal=problem.causal, features=problem.features, extras=extras)
    config = KERNEL.default_config(problem, HOPPER)
    return gradients_of(problem, config, [q, k, v, out.half(), lse, torch.randn(out.shape).half()], extras, 3)


@pytest.mark.few(6)
@pytest.mark.parametrize("order", ["", "deterministic"])
@pytest.mark.parametrize("causal", [NO, LOWER_RIGHT])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_whole_blocks(head_dim: int, causal: Causal, order: str) -> None:
    check(shape_of(256, 384 if order else 256, head_dim, order, causal=causal))


@pytest.mark.few(3)
@pytest.mark.parametrize("features", ["", "window=60:20", "boolean", "alibi"])
@pytest.mark.parametrize("dims", [(136, 136), (192, 128), (256, 256)], ids=str)
def test_wide_groups_in_parts(dims: tuple[int, int], features: str) -> None:
    """Each part leaves gradients of keys and values of its own, which are added up."""
    head_dim, head_dim_v = dims
    sizes = {"head_dim_v": head_dim_v, "num_heads": 8, "num_heads_kv": 2}
    asked = shape_of(130, 190, head_dim, features, causal=LOWER_RIGHT if "window" not in features else NO, **sizes)
    for count in (2, 4):
        check(asked, group_parts=count)


@pytest.mark.few(4)
@pytest.mark.parametrize("lengths", [(256, 256), (200, 333), (333, 200)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_last_heads_walk_back_under_a_diagonal(
    head_dim: int, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of one head: two of three take the last keys first, one the first keys."""
    monkeypatch.setattr(parts, "DIAGONAL_HEADS", 1)
    check(shape_of(*lengths, head_dim, "deterministic", causal=LOWER_RIGHT, num_heads=3, num_heads_kv=3))


@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_last_packed_sequences_walk_back(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "DIAGONAL_HEADS", 1)
    problem = shape_of(130, 130, head_dim, "varlen deterministic", causal=LOWER_RIGHT, batch=3)
    check(problem, lengths=((130, 0, 70), (100, 30, 130)))


@pytest.mark.few(4)
@pytest.mark.parametrize("named_barriers", [0, 1])
@pytest.mark.parametrize("others", ["", "window=70:9", "varlen"])
@pytest.mark.parametrize("causal", [NO, LOWER_RIGHT])
def test_each_warpgroup_owns_half_of_the_keys(
    causal: Causal, others: str, named_barriers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of 192 columns and values of 128, in tiles of one step and more, by blocks that take several."""
    if causal is not NO and others.startswith("window"):
        others = "window=70:0"
    lengths = ((70, 0, 33, 130, 64), (150, 64, 0, 130, 300)) if others == "varlen" else ()
    sizes = {"head_dim_v": 128, "num_heads": 4, "causal": causal} | ({"batch": 5} if lengths else {})
    problem = shape_of(130 if lengths else 200, 300, 192, others, **sizes)
    monkeypatch.setattr(layout, "MIN_HALVED_TILES", 1)
    assert keys_of_block(problem) == 128
    check(problem, lengths=lengths, named_barriers=named_barriers)


@pytest.mark.few(3)
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("length", [128, 384, 640])
def test_scores_that_run_ahead(length: int, programs: int) -> None:
    """Walks of two steps and more, by blocks that take one tile or several."""
    problem = shape_of(length, length, 128, causal=LOWER_RIGHT)
    assert runs_ahead(problem, KERNEL.default_config(problem, HOPPER))
    ahead = check(problem, programs)
    for gradient, other in zip(ahead, check(problem, programs, named_barriers=0), strict=True):
        torch.testing.assert_close(gradient, other, rtol=2e-3, atol=2e-3)


@pytest.mark.few(8)
@pytest.mark.parametrize("order", ["", "deterministic"])
@pytest.mark.parametrize("others", ["window=70:9", "softcap", "window=100:-1 softcap"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_masks_and_lengths(head_dim: int, others: str, order: str) -> None:
    check(shape_of(200, 301, head_dim, f"{order} {others}"))


@pytest.mark.few(3)
@pytest.mark.parametrize("features", ["", "window=100:40", "softcap"])
@pytest.mark.parametrize("causal", [NO, LOWER_RIGHT])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_groups_of_query_heads(head_dim: int, causal: Causal, features: str) -> None:
    """The first scores of a head that follows another one run ahead, too."""
    sizes = {"num_heads": 6, "num_heads_kv": 2}
    check(shape_of(256, 256 if not features else 200, head_dim, features, causal=causal, **sizes), group_parts=1)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 40), (24, 32), (192, 128), (256, 256)])
def test_groups_in_a_fixed_order(head_dim: int, head_dim_v: int) -> None:
    sizes = {"num_heads": 4, "num_heads_kv": 2, "head_dim_v": head_dim_v}
    check(shape_of(130, 257, head_dim, "deterministic", causal=UPPER_LEFT, **sizes), group_parts=1)


@pytest.mark.few(3)
@pytest.mark.parametrize("causal", [NO, LOWER_RIGHT])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_fixed_order_is_the_same_however_many_blocks_there_are(head_dim: int, causal: Causal) -> None:
    problem = shape_of(128, 640, head_dim, "deterministic", causal=causal)
    alone, *others = (check(problem, programs) for programs in (1, 2, 7))
    for found in others:
        assert all(map(torch.equal, alone, found))


@pytest.mark.few(6)
@pytest.mark.parametrize("order", ["", "deterministic"])
@pytest.mark.parametrize(("causal", "window"), [(LOWER_RIGHT, ""), (NO, "window=50:20")])
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 192, 256])
def test_packed_sequences(head_dim: int, causal: Causal, window: str, order: str) -> None:
    lengths = (70, 0, 33, 130, 64), (150, 64, 0, 130, 300)
    problem = shape_of(130, 300, head_dim, f"varlen {order} {window}", causal=causal, batch=5)
    check(problem, lengths=lengths)


@pytest.mark.few(3)
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("features", ["", "window=100:40"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_a_fixed_order_with_memory_for_one_step_or_two(head_dim: int, features: str, num_stages: int) -> None:
    """Many blocks together, and groups of query heads: blocks are ahead of each other by heads, too."""
    sizes = {"num_heads": 4, "num_heads_kv": 2}
    problem = shape_of(321, 450, head_dim, f"deterministic {features}", **sizes)
    config = KernelConfig.of(
        KERNEL.name, dict(KERNEL.default_config(problem, HOPPER).parameters) | {"num_stages": num_stages}
    )
    assert dq_slots(problem, config) == (2 if head_dim == 64 or (head_dim, num_stages) == (128, 2) else 1)
    alone = check(problem, 1, num_stages=num_stages, group_parts=1)
    assert all(map(torch.equal, alone, check(problem, 6, num_stages=num_stages, group_parts=1)))
