"""The merge of what parts of the keys leave."""

import pytest
import torch

from blocktune.kernels.hopper.forward.split.merge import ROWS, merge_parts_kernel
from tests.support.triton_modes import DEVICE, runs

pytestmark = pytest.mark.interpreted


@runs
@pytest.mark.parametrize(("seqlen_q", "head_dim_v", "parts"), [(1, 64, 2), (33, 96, 3), (16, 40, 16)])
def test_merge_is_the_weighted_mean(seqlen_q: int, head_dim_v: int, parts: int) -> None:
    """The last part saw no key, nor did the last row in any; the output is laid out [batch, seqlen, heads, dim]."""
    generator = torch.Generator().manual_seed(parts)
    batch, heads = 2, 3
    outputs = torch.randn(batch, heads, parts, seqlen_q, head_dim_v, generator=generator).half()
    sums = 20 * torch.randn(batch, heads, parts, seqlen_q, generator=generator)
    sums[:, :, -1] = float("-inf")
    sums[..., -1] = float("-inf")
    outputs[sums.isneginf()] = 0.0
    out = torch.full((batch, seqlen_q, heads, head_dim_v), 7.0, device=DEVICE).half().transpose(1, 2)
    lse = torch.full((batch, heads, seqlen_q), 7.0, device=DEVICE)
    strides = (stride // 8 for stride in out.stride()[:3])
    constants = parts, head_dim_v, 1 << (head_dim_v - 1).bit_length(), ROWS, 8
    grid = -(-seqlen_q // ROWS), batch * heads
    merge_parts_kernel[grid](outputs.to(DEVICE), sums.to(DEVICE), out, lse, *strides, heads, seqlen_q, *constants)
    weights = sums.double().softmax(2).nan_to_num(0.0)
    expected = (weights[..., None] * outputs.double()).sum(2)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(lse.cpu().double(), sums.double().logsumexp(2), rtol=1e-6, atol=1e-5)


@runs
def test_entries_of_the_output_may_be_far_apart() -> None:
    """By more elements than an integer of 32 bits counts, in rows of 40 columns, with strides counted in eights."""
    parts, seqlen_q, head_dim_v = 2, 3, 40
    strides = (1 << 31) + 8, head_dim_v, head_dim_v, 1
    memory = torch.empty(strides[0] + seqlen_q * head_dim_v, dtype=torch.float16, device=DEVICE)
    out = memory.as_strided((2, 1, seqlen_q, head_dim_v), strides)
    outputs = torch.randn(2, 1, parts, seqlen_q, head_dim_v, generator=torch.Generator().manual_seed(0)).half()
    sums = torch.zeros(2, 1, parts, seqlen_q)
    units = (stride // 8 for stride in strides[:3])
    constants = parts, head_dim_v, 64, ROWS, 8
    merge_parts_kernel[(1, 2)](outputs.to(DEVICE), sums.to(DEVICE), out, None, *units, 1, seqlen_q, *constants)
    torch.testing.assert_close(out.cpu().float(), outputs.float().mean(2), rtol=2e-3, atol=1e-3)
