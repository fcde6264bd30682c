"""The sources of the Hopper forwards on the CPU, by tests/support/gluon/machine.py: problems, runs and comparisons."""

from dataclasses import replace
from typing import Any

import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.gluon import machine as gluon_machine

HOPPER = limits_for((9, 0))
KERNEL = FlashForwardHopper()
TOLERANCE = 1e-3
"""Relative Frobenius error of float16 probabilities and outputs."""
LSE_TOLERANCE = 1e-4
EDGES = [(1, 1), (1, 300), (63, 65), (64, 64), (65, 63), (128, 129), (129, 127), (192, 193), (257, 255), (300, 1)]
WINDOWS = [(0, 0), (20, 9), (-1, 3), (64, -1), (63, 0), (100, 128), (300, 300)]


SEQUENCES = [
    ((100, 0, 257, 64), (30, 200, 129, 64)),
    ((64, 64), (0, 128)),
    ((1, 300, 2), (300, 1, 0)),
]


def shape_of(
    seqlen_q: int = 200, seqlen_k: int = 200, head_dim: int = 64, features: str = "", **changes: Any
) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_heads_kv": 1, "head_dim_v": head_dim, "dtype": "float16"}
    sizes |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim} | changes
    return AttentionShape(**sizes, features=Features.parse(features))


def config_of(problem: AttentionShape, kernel: FlashForwardHopper = KERNEL, **changes: int) -> KernelConfig:
    default = kernel.default_config(problem, HOPPER)
    return KernelConfig.of(kernel.name, dict(default.parameters) | changes)


def draw(batch: int, heads: int, rows: int, dim: int, layout: str) -> torch.Tensor:
    sizes = (batch, heads, rows, dim) if layout == "bhsd" else (batch, rows, heads, dim)
    drawn = torch.randn(sizes).half()
    return drawn if layout == "bhsd" else drawn.transpose(1, 2)


def tensors(problem: AttentionShape, layout: str = "bhsd", tokens: tuple[int, int] | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    batch, (rows, keys) = problem.batch if tokens is None else 1, tokens or (problem.seqlen_q, problem.seqlen_k)
    return [
        draw(batch, problem.num_heads, rows, problem.head_dim, layout),
        draw(batch, problem.num_heads_kv, keys, problem.head_dim, layout),
        draw(batch, problem.num_heads_kv, keys, problem.head_dim_v, layout),
    ]


def run(
    problem: AttentionShape,
    config: KernelConfig,
    qkv: list[torch.Tensor],
    extras: Extras,
    programs: int,
    kernel: FlashForwardHopper = KERNEL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, 7 where nothing is written."""
    assert kernel.violations(config, problem, HOPPER) == ()
    q = qkv[0]
    out = torch.full((*q.shape[:-1], problem.head_dim_v), 7.0).half()
    lse = torch.full(q.shape[1:3] if problem.features.varlen else q.shape[:3], 7.0)
    launch: Any = (kernel.bind if extras.sinks is None else kernel.bind_with_sinks)(config, problem)
    given = (extras,) if problem.features or extras.sinks is not None else ()
    arguments = launch.arguments(*qkv, out, lse, problem.head_dim**-0.5, *given)
    gluon_machine.run(launch.function, arguments, programs)
    (counter,) = (
        each for each in arguments if isinstance(each, torch.Tensor) and each.dtype is torch.int32 and each.numel() == 2
    )
    assert counter.tolist() == [0, 0]  # as the next launch expects it
    return out, lse


def check(
    problem: AttentionShape,
    config: KernelConfig | None = None,
    layout: str = "bhsd",
    qkv: list[torch.Tensor] | None = None,
    programs: int = 2,
    kernel: FlashForwardHopper = KERNEL,
) -> None:
    config, qkv = config or config_of(problem, kernel), qkv or tensors(problem, layout)
    extras = Extras(softcap=1.5 if problem.features.softcap else 0.0)
    out, lse = run(problem, config, qkv, extras, programs, kernel)
    expected = attention_reference(*qkv, causal=problem.causal, features=problem.features, extras=extras)
    compare(out, lse, *expected)


def compare(out: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor) -> None:
    assert torch.isfinite(out).all()
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert (out[expected_lse.view(out.shape[:-1]).isneginf()] == 0).all()
    assert (out.float() - expected).norm() <= TOLERANCE * expected.norm()
    seen = ~expected_lse.isneginf()
    assert ((lse - expected_lse)[seen].abs() <= LSE_TOLERANCE).all()


SINKS = {"usual": (0.5, -2.0), "no sink in one head": (float("-inf"), 6.0), "above all scores": (200.0, -0.5)}
"""Of two heads."""


def check_sinks(problem: AttentionShape, sinks: str, kernel: FlashForwardHopper = KERNEL) -> None:
    qkv, extras = tensors(problem), Extras(softcap=1.5 if problem.features.softcap else 0.0)
    given = torch.tensor(SINKS[sinks]).bfloat16()
    found = run(problem, config_of(problem, kernel), qkv, replace(extras, sinks=given), 2, kernel)
    options: dict[str, Any] = {"causal": problem.causal, "features": problem.features, "extras": extras}
    own, own_lse = attention_reference(*qkv, **options, dtype=torch.float64)
    compare(*found, *with_sinks(own, own_lse, given))
    assert (found[0][own_lse.isneginf()] == 0).all()


def check_huge_scores(
    problem: AttentionShape, kernel: FlashForwardHopper = KERNEL, sinks: torch.Tensor | None = None
) -> None:
    q, k, v = tensors(problem)
    q[:, :, ::3] *= 6000.0
    q[:, :, 1::9] = -6000.0
    k = (k.float().abs() * 6000.0).half()
    k[:, :, 1::2] = k[:, :, ::2]
    out, lse = run(problem, config_of(problem, kernel), [q, k, v], Extras(sinks=sinks), 2, kernel)
    scores = q.double() @ k.double().mT * problem.head_dim**-0.5
    if problem.causal is Causal.UPPER_LEFT:
        scores += torch.full(scores.shape[2:], float("-inf")).triu(1)
    expected, expected_lse = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    if sinks is not None:
        expected, expected_lse = with_sinks(expected, expected_lse, sinks)
    assert torch.isfinite(out).all()
    assert (out.double() - expected).norm() <= TOLERANCE * expected.norm()
    summands = (q.double().abs() @ k.double().abs().mT).amax(-1) * problem.head_dim**-0.5  # added up in float32
    assert ((lse - expected_lse).abs() <= 2**-22 * summands + LSE_TOLERANCE).all()


HIDDEN = {"first": slice(0, 70), "last": slice(120, 256), "starts": slice(0, 256, 64), "all": slice(0, 256)}


def check_infinite_keys(problem: AttentionShape, keys: slice, kernel: FlashForwardHopper = KERNEL) -> None:
    """Keys with an infinite element that all queries meet with a positive one count as keys that no query sees."""
    q, k, v = tensors(problem)
    q[..., 0] = q[..., 0].abs() + 0.5
    seen = torch.ones(1, 1, problem.seqlen_q, problem.seqlen_k, dtype=torch.bool)
    seen[..., keys] = False
    expected = attention_reference(
        q, k, v, causal=problem.causal, features=Features.parse("boolean"), extras=Extras(mask=seen)
    )
    k[..., keys, 0] = float("-inf")
    compare(*run(problem, config_of(problem, kernel), [q, k, v], Extras(), 2, kernel), *expected)


def read_now(pending: int, deps: Any) -> Any:
    """A wait that waits for nothing."""
    values = tuple(getattr(dep, "value", dep) for dep in deps)
    assert all(value is not None for value in values), "a result is used before it is waited for"
    return values[0] if len(values) == 1 else values
