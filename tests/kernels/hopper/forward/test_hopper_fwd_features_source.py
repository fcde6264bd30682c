"""The Hopper forward with ALiBi, masks and dropout: its source on the CPU, by tests/support/gluon/machine.py."""

import itertools
from typing import Any

import pytest
import torch

from blocktune.kernels.base.direct_launch import with_descriptors
from blocktune.kernels.hopper.biases.mask_pass import LaidMask
from blocktune.kernels.hopper.forward import launch as forward_launch
from blocktune.kernels.hopper.forward.device_kernel import flash_fwd_hopper_kernel
from blocktune.kernels.hopper.forward.launch import MaskedLaunch, leading_with_extras
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.reference import attention_reference, visible
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.attention.laid_masks import bounded, laid_out
from tests.support.attention.masked_rows import lse_of_kernels, masked_rows
from tests.support.gluon import machine as gluon_machine
from tests.support.gluon.hopper_forward import (
    HOPPER,
    KERNEL,
    SEQUENCES,
    TOLERANCE,
    compare,
    config_of,
    run,
    shape_of,
    tensors,
)

pytestmark = pytest.mark.triton_free

WORDS = ("alibi", "boolean", "additive", "dropout")
COMBINATIONS = ("alibi boolean", "alibi additive", "alibi dropout", "boolean dropout", "additive dropout softcap")
LEAST = torch.finfo(torch.float32).min
BROADCASTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 200), (1, 2, 200), (2, 2, 200)]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_launch, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))


def extras_of(problem: AttentionShape, sizes: tuple[int, int, int] | None = None, **changes: Any) -> Extras:
    """Random extras. The masks hide a fifth of the pairs, of every third row all, and the first key always."""
    features = problem.features
    batch, heads, queries = sizes or (1, 1, problem.seqlen_q)
    seen = torch.rand(batch, heads, queries, problem.seqlen_k) > 0.2
    seen[:, :, 1::3], seen[..., 0] = False, False
    bias = torch.randn(seen.shape).half().masked_fill(~seen, float("-inf"))
    given: dict[str, Any] = {"softcap": 1.5 if features.softcap else 0.0}
    given |= {"mask": {MaskKind.BOOLEAN: seen, MaskKind.ADDITIVE: bias}.get(features.mask)}
    given |= {"alibi_slopes": torch.rand(problem.batch, problem.num_heads) / 4 if features.alibi else None}
    given |= {"dropout_p": 0.3, "seed": 0xDEADBEEF_87654321, "offset": 5} if features.dropout else {}
    return Extras(**given | changes)


def run_any(
    problem: AttentionShape, qkv: list[torch.Tensor], extras: Extras, config: KernelConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, with a mask that is laid out by PyTorch."""
    config = config or config_of(problem)
    if extras.mask is None:
        return run(problem, config, qkv, extras, programs=2)
    assert KERNEL.violations(config, problem, HOPPER) == ()
    launch = KERNEL.bind(config, problem)
    assert isinstance(launch, MaskedLaunch)
    q = qkv[0]
    out = torch.full((*q.shape[:-1], problem.head_dim_v), 7.0).half()
    lse = torch.full(q.shape[1:3] if problem.features.varlen else q.shape[:3], 7.0)
    mask = laid_out(extras.mask), *LaidMask.of(extras.mask).strides(extras.mask)
    values = leading_with_extras(problem, *qkv, out, lse, problem.head_dim**-0.5, extras, mask)
    gluon_machine.run(
        flash_fwd_hopper_kernel, (*with_descriptors(values, launch.descriptors), *launch.fixed), programs=2
    )
    return out, lse


def check(problem: AttentionShape, extras: Extras | None = None, config: KernelConfig | None = None) -> None:
    qkv = tensors(problem)
    extras = extras or extras_of(problem)
    options: dict[str, Any] = {"causal": problem.causal, "features": problem.features, "extras": extras}
    compare(*run_any(problem, qkv, extras, config), *attention_reference(*qkv, **options, dtype=torch.float64))


@pytest.mark.few(9)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("features", [*WORDS, *COMBINATIONS])
def test_lengths_around_the_edges_of_tiles(features: str, causal: Causal) -> None:
    for seqlen_q, seqlen_k in ((1, 300), (64, 64), (100, 170), (129, 127), (257, 255)):
        check(shape_of(seqlen_q, seqlen_k, features=features, causal=causal))
    check(shape_of(200, 200, 128, features, causal=causal))


@pytest.mark.few(4)
@pytest.mark.parametrize("features", WORDS)
@pytest.mark.parametrize("head_dim", [96, 192, 256])
def test_head_dimensions(head_dim: int, features: str) -> None:
    check(shape_of(150, 200, head_dim, features, causal=Causal.LOWER_RIGHT))


@pytest.mark.parametrize("features", WORDS)
def test_windows_and_grouped_heads_of_a_batch(features: str) -> None:
    problem = shape_of(200, 230, features=f"{features} window=40:20", batch=2, num_heads=4, num_heads_kv=2)
    check(problem)
    check(shape_of(200, 230, features=f"{features} window=40:0", batch=2))


@pytest.mark.few(6)
@pytest.mark.parametrize("sizes", BROADCASTS)
@pytest.mark.parametrize("features", ["boolean", "additive"])
def test_masks_that_heads_entries_or_queries_share(features: str, sizes: tuple[int, int, int]) -> None:
    problem = shape_of(200, 170, features=features, batch=2)
    check(problem, extras_of(problem, sizes))


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("block_m", "block_n", "num_stages", "own"),
    [(128, 64, 2, (0, 0, 1)), (192, 128, 2, (1, 1, 1)), (256, 64, 3, (1, 1, 0)), (128, 128, 2, (1, 1, 1))],
)
@pytest.mark.parametrize("features", [*WORDS, "alibi additive dropout"])
def test_parameters(features: str, block_m: int, block_n: int, num_stages: int, own: tuple[int, int, int]) -> None:
    names = {"block_m": block_m, "block_n": block_n, "num_stages": num_stages, "q_registers": 0}
    names |= dict(zip(("split_release", "early_p", "keep_p"), own, strict=True))
    for causal in (Causal.NONE, Causal.UPPER_LEFT):
        problem = shape_of(300, 300, features=features, num_heads=1, causal=causal)
        check(problem, config=config_of(problem, **names))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("block_m", "block_n", "split_release"),
    [(128, 128, 0), (128, 128, 2), (128, 64, 0), (192, 64, 1), (192, 128, 0), (256, 64, 0)],
)
@pytest.mark.parametrize("features", ["alibi", "alibi softcap", "alibi dropout"])
def test_walks_that_begin_at_the_diagonal(features: str, block_m: int, block_n: int, split_release: int) -> None:
    """In the middle of the keys, and round; one more or one less query moves the diagonal off the edges of blocks."""
    for seqlen_q, seqlen_k in ((384, 384), (256, 640), (640, 256), (255, 384), (257, 384)):
        problem = shape_of(seqlen_q, seqlen_k, features=features, num_heads=1)
        own = {"block_m": block_m, "block_n": block_n, "split_release": split_release, "num_stages": 4}
        own |= {"early_p": 1}  # scores of 256 rows leave no registers for late ones
        check(problem, config=config_of(problem, **own))


@pytest.mark.few(4)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("head_dim", "features"), [(64, "additive"), (64, "additive dropout"), (128, "additive")])
def test_scores_that_begin_with_a_mask(head_dim: int, features: str, causal: Causal) -> None:
    """With queries in registers; the scale of 64 columns is a power of two, that of 128 is none."""
    own = {"block_m": 128, "block_n": 64, "num_stages": 3, "split_release": 0, "q_registers": head_dim}
    for seqlen_q, seqlen_k in ((100, 170), (257, 255)):
        problem = shape_of(seqlen_q, seqlen_k, head_dim, features, causal=causal)
        check(problem, config=config_of(problem, **own))


@pytest.mark.parametrize("q_registers", [0, 64])
@pytest.mark.parametrize("hidden", [-1e4, -1e9, -1e30, torch.finfo(torch.float32).min])
def test_additive_masks_that_hide_with_finite_numbers(hidden: float, q_registers: int) -> None:
    """Also in a row's first blocks, before any key that it sees; the mean of the values where a row sees none."""
    problem = shape_of(100, 300, features="additive")
    mask = torch.zeros(1, 1, 100, 300)
    mask[..., :65], mask[:, :, ::2, 150:], mask[:, :, ::7] = hidden, hidden, hidden
    q, k, v = tensors(problem)
    config = config_of(problem, q_registers=q_registers)
    found, _ = run_any(problem, [q, k, v], Extras(mask=mask), config)
    scores = q.float() @ k.float().mT * problem.head_dim**-0.5 + mask  # float32 keeps no score beside such numbers
    right = scores.double().softmax(-1) @ v.double()
    assert (found.double() - right).norm() <= TOLERANCE * right.norm()


@pytest.mark.few(3)
@pytest.mark.parametrize("q_registers", [0, 64])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize(("dtype", "hidden"), [("float32", LEAST), ("float32", -1e9), ("float16", -65504.0)], ids=str)
def test_rows_that_finite_numbers_hide(dtype: str, hidden: float, causal: Causal, q_registers: int) -> None:
    """The log-sum-exp says how many keys such a row has."""
    problem = shape_of(100, 300, features="additive", causal=causal)
    mask = masked_rows(100, 300, hidden, getattr(torch, dtype))
    q, k, v = tensors(problem)
    found, lse = run_any(problem, [q, k, v], Extras(mask=mask), config_of(problem, q_registers=q_registers))
    scores = (q.double() @ k.double().mT * problem.head_dim**-0.5).float() + bounded(mask)
    scores = scores.masked_fill(~visible(100, 300, causal, mask.device), float("-inf")).double()
    blind = scores.isneginf().all(-1, keepdim=True)
    right = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ v.double()
    assert (found.double() - right).norm() <= TOLERANCE * right.norm()
    torch.testing.assert_close(lse, lse_of_kernels(scores), rtol=2e-7, atol=1e-2 if dtype == "float16" else 1e-4)


@pytest.mark.few(6)
@pytest.mark.parametrize(("lengths_q", "lengths_k"), SEQUENCES)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("features", ["alibi", "boolean", "additive", "dropout", "alibi additive dropout window=70:20"])
def test_packed_sequences(
    features: str, causal: Causal, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]
) -> None:
    sizes = {"seqlen_q": max(lengths_q), "seqlen_k": max(lengths_k), "batch": len(lengths_q)}
    problem = shape_of(**sizes, features=f"varlen {features}", causal=causal)
    qkv = tensors(problem, tokens=(sum(lengths_q), sum(lengths_k)))
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (lengths_q, lengths_k)
    )
    extras = extras_of(problem, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    options: dict[str, Any] = {"causal": causal, "features": problem.features, "extras": extras}
    compare(*run_any(problem, qkv, extras), *attention_reference(*qkv, **options, dtype=torch.float64))


@pytest.mark.parametrize("head_dim", [40, 64, 256])
def test_a_maximum_that_outgrows_the_scale_of_rows_under_an_additive_mask(head_dim: int) -> None:
    """Scores of 9.0e7 are scaled by log2(e), those of 9.4e7 by one, and those before them count for nothing then."""
    problem = shape_of(64, 512, head_dim=head_dim, features="additive")
    q, k, v = tensors(problem)
    q[:], k[:] = 4000.0, 0.0
    k[:, :, 256:] = 9.0e7 / (4000 * head_dim**0.5)  # blocks are visited from the last one on
    k[:, :, :256] = 9.4e7 / (4000 * head_dim**0.5)
    out, _ = run_any(problem, [q, k, v], extras_of(problem, mask=torch.zeros(1, 1, 64, 512).half()))
    wanted = v[:, :, :256].float().mean(2, keepdim=True).expand_as(out)
    assert (out.float() - wanted).norm() <= TOLERANCE * wanted.norm()


@pytest.mark.parametrize("features", ["", "boolean", "additive", "additive dropout"])
@pytest.mark.parametrize("seqlen_k", [1, 100, 128])
def test_an_infinite_query_whose_scores_are_all_minus_infinity_sees_no_key(features: str, seqlen_k: int) -> None:
    """Keys after the last one are zeros, of which it makes NaN."""
    problem = shape_of(4, seqlen_k, features=features)
    q, k, v = tensors(problem)
    k[..., 3] = k[..., 3].abs() + 0.5
    q[:, :, 1, 3] = float("-inf")
    mask = torch.zeros(1, 1, 4, seqlen_k).half()
    masks = {MaskKind.NONE: None, MaskKind.BOOLEAN: mask == 0, MaskKind.ADDITIVE: mask}
    out, lse = run_any(problem, [q, k, v], extras_of(problem, mask=masks[problem.features.mask]))
    assert not out[:, :, 1].any()
    assert torch.equal(lse.isneginf(), (torch.arange(4) == 1).expand(lse.shape))
    assert out.isfinite().all()
