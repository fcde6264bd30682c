"""flash_attn_func and its relatives, against their definition in float64 written out pair by pair: PyTorch's
mathematics on the CPU, our kernels on a GPU."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.dispatcher import attention
from blocktune.runtime.dispatch.launches.plans import TorchPlan

pytestmark = pytest.mark.triton_free

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {"cpu": 1e-5, "cuda": 1.5e-2}
"""Relative Frobenius error: float32 on the CPU, bfloat16 on a GPU."""


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Plans are made by the test alone, and not made again when a file has been read."""
    attention.reload()
    if torch.cuda.is_available():
        attention._settle(None)


def defined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Of one sequence: q [rows, heads, dim], k and v [keys, heads_kv, dim], in float64; output and log-sum-exp
    [heads, rows]."""
    rows, heads, dim = q.shape
    keys, group = k.shape[0], heads // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    far = torch.zeros(rows, keys, dtype=torch.float64)
    for i in range(rows):
        for j in range(keys):
            middle = i + keys - rows
            far[i, j] = abs(middle - j)
            left, right = window_size
            hidden[i, j] = (
                (causal and j > middle) or (left >= 0 and j < middle - left) or (right >= 0 and j > middle + right)
            )
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * far
    scores = scores.masked_fill(hidden, float("-inf"))
    p = scores.softmax(-1).masked_fill(hidden.all(-1)[:, None], 0.0)
    return torch.einsum("hij,jhd->ihd", p, v), scores.logsumexp(-1)


def random(*sizes: int, device: str) -> Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)


def exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


def assert_right(got: Tensor, right: Tensor, device: str) -> None:
    difference = (got.detach().double().cpu() - right.detach()).norm()
    assert difference <= BOUND[device] * right.detach().norm() + 1e-12


def assert_ours(device: str) -> None:
    plans = attention._resolver.plans
    assert bool(plans) or device == "cpu"
    assert not any(isinstance(plan, TorchPlan) for plan in plans.values() if device == "cuda")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (9, 0), "softmax_scale": 0.2},
    {"window_size": (5, 3), "softcap": 4.0},
    {"causal": True, "alibi_slopes": True},
    {"window_size": (-1, 2), "alibi_slopes": True, "softcap": 20.0},
]


def with_slopes(options: dict[str, Any], heads: int, device: str) -> dict[str, Any]:
    if not options.get("alibi_slopes"):
        return options
    return options | {"alibi_slopes": torch.rand(heads, device=device)}


@pytest.mark.parametrize("lengths", [(17, 29), (29, 17), (24, 24)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_it_is_attention_from_the_lower_right(device: str, options: dict[str, Any], lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    options = with_slopes(options, 4, device)
    q = random(2, lengths[0], 4, 32, device=device)
    k, v = (random(2, lengths[1], 2, 32, device=device) for _ in range(2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    result = flash_attn_func(*leaves, **options, return_attn_probs=True)
    out, lse, probabilities = result
    assert probabilities is None
    assert out.shape == q.shape
    assert lse.shape == (2, 4, lengths[0])
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    doubles = exact(*leaves)
    right = [defined(*(tensor[entry] for tensor in doubles), **on_cpu) for entry in range(2)]
    assert_right(out, torch.stack([one for one, _ in right]), device)
    finite = torch.stack([sums for _, sums in right])
    torch.testing.assert_close(lse.double().cpu(), finite.detach(), atol=2e-2 if device == "cuda" else 1e-5, rtol=1e-2)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, grad)
    expected = torch.autograd.grad(torch.stack([one for one, _ in right]), doubles, grad.double().cpu())
    for one, wanted in zip(got, expected, strict=True):
        assert_right(one, wanted, device)
    assert_ours(device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_short_way_is_the_long_way(device: str, causal: bool) -> None:
    q, k, v = random(2, 48, 4, 32, device=device), *(random(2, 48, 2, 32, device=device) for _ in "kv")
    short = flash_attn_func(q, k, v, causal=causal)
    long, *_ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    torch.testing.assert_close(short, long, atol=BOUND[device], rtol=BOUND[device])
    assert short.stride() == long.stride() == q.stride()
    assert len(attention.resolver.plans) == (1 if device == "cpu" else 2)  # the log-sum-exp is wanted or not


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences_are_sequences(device: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options = with_slopes(options, 4, device)
    lengths_q, lengths_k = [7, 0, 19, 1], [11, 5, 13, 0]
    q = random(sum(lengths_q) + 2, 4, 32, device=device).requires_grad_()
    k, v = (random(sum(lengths_k) + 3, 2, 32, device=device).requires_grad_() for _ in range(2))
    bounds = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device) for lengths in (lengths_q, lengths_k)]
    out, lse, _ = flash_attn_varlen_func(q, k, v, *bounds, 20, 13, **options, return_attn_probs=True)
    assert lse.shape == (4, q.shape[0])
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    doubles = exact(q, k, v)
    dq, dk, dv = (tensor.split([*lengths, extra]) for tensor, lengths, extra in
                  zip(doubles, (lengths_q, lengths_k, lengths_k), (2, 3, 3), strict=True))  # fmt: skip
    right = torch.cat([*(defined(dq[n], dk[n], dv[n], **on_cpu)[0] for n in range(4)), torch.zeros(2, 4, 32)])
    assert_right(out, right, device)
    assert not bool(out[-2:].any())
    assert bool(lse[:, -2:].isneginf().all())
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    expected = torch.autograd.grad(right, doubles, grad.double().cpu())
    for one, wanted, extra in zip(got, expected, (2, 3, 3), strict=True):
        assert_right(one, wanted, device)
        assert not bool(one[-extra:].any())
    assert_ours(device)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_is_drawn_by_pytorchs_generator_and_kept_for_the_backward(device: str) -> None:
    q, k, v = (random(1, 40, 2, 32, device=device).requires_grad_() for _ in range(3))

    def attend() -> list[Tensor]:
        torch.manual_seed(3)
        out = flash_attn_func(q, k, v, dropout_p=0.5, causal=True, window_size=(30, -1))
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    first, second = attend(), attend()
    assert torch.equal(first[0], second[0])
    for one, other in zip(first[1:], second[1:], strict=True):  # equal but for the order of additions
        torch.testing.assert_close(one, other, atol=BOUND[device], rtol=BOUND[device])
    values = v.detach().clone().requires_grad_()
    torch.manual_seed(3)
    out = flash_attn_func(q.detach(), k.detach(), values, dropout_p=0.5, causal=True, window_size=(30, -1))
    # the output is linear in the values: with the same pairs dropped, <dv, v> is <dout, out>
    grad = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, values, grad)
    pairs = ((dv.double() * values.detach().double()).sum(), (grad.double() * out.detach().double()).sum())
    torch.testing.assert_close(*pairs, atol=BOUND[device] * float(out.detach().norm() * grad.norm()), rtol=0.0)
    plain = flash_attn_func(q, k, v, causal=True, window_size=(30, -1))
    assert not torch.allclose(first[0], plain, atol=0.1)
    assert_ours(device)


@pytest.mark.parametrize("options", [{"window_size": (6, 0)}, {"softcap": 3.0, "causal": True}, {"alibi_slopes": True}])
@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_has_the_same_features(device: str, options: dict[str, Any]) -> None:
    options = with_slopes(options, 4, device)
    q = random(2, 2, 4, 32, device=device)
    k, v = (random(2, 32, 2, 32, device=device) for _ in range(2))
    lengths = torch.tensor([9, 32], dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options, return_softmax_lse=True)
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    for entry, length in enumerate(lengths.tolist()):
        right, sums = defined(
            q[entry].double().cpu(), *(cache[entry, :length].double().cpu() for cache in (k, v)), **on_cpu
        )
        assert_right(out[entry], right, device)
        assert_right(lse[entry], sums, device)
    assert_ours(device)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            flash_attn_func,
            "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
        ),
        (
            flash_attn_varlen_func,
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size "
            "softcap alibi_slopes deterministic return_attn_probs block_table",
        ),
    ],
)
def test_the_order_is_flash_attention_2s(function: Any, names: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    by_place = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    assert by_place == names.split()


Q, KV = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 2, 16)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("4 dimensions", (Q[0], KV[0], KV[0])),
        ("must agree", (Q, KV, KV[:, :4])),
        ("must agree", (Q, KV[..., :8], KV)),
        ("num_heads % num_heads_kv", (Q[:, :, :3], KV, KV)),
        ("one data type", (Q.half(), KV, KV)),
        ("floating-point", (Q.long(), KV.long(), KV.long())),
        ("0 <= dropout_p < 1", (Q, KV, KV, 1.5)),
        ("window", (Q, KV, KV, 0.0, None, False, (-2, 3))),
        ("softcap >= 0", (Q, KV, KV, 0.0, None, False, (-1, -1), -1.0)),
        ("alibi_slopes", (Q, KV, KV, 0.0, None, False, (-1, -1), 0.0, torch.zeros(3))),
        ("alibi_slopes", (Q, KV, KV, 0.0, None, False, (-1, -1), 0.0, torch.zeros(4).half())),
    ],
)
def test_bad_arguments_are_refused(message: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=message):
        flash_attn_func(*arguments)


PACKED = torch.zeros(10, 2, 16)


def bounds(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("begin with 0 and ascend", {"cu_seqlens_q": bounds(1, 4, 10)}),
        ("begin with 0 and ascend", {"cu_seqlens_k": bounds(0, 6, 4)}),
        (r"cu_seqlens_k\[-1\] <= tokens", {"cu_seqlens_k": bounds(0, 6, 11)}),
        ("max_seqlen_q` must be no less", {"max_seqlen_q": 5}),
        ("max_seqlen_k` must be no less", {"max_seqlen_k": 5}),
        ("max_seqlen_q >= 0", {"max_seqlen_q": -1}),
        ("must be int32", {"cu_seqlens_q": bounds(0, 4, 10, dtype=torch.int64)}),
        ("must be int32", {"cu_seqlens_q": bounds(0, 0, 4, 4, 10, 10)[::2]}),
        ("same number of sequences", {"cu_seqlens_q": bounds(0, 10)}),
        ("same number of sequences", {"cu_seqlens_q": bounds(0), "cu_seqlens_k": bounds(0)}),
    ],
)
def test_bad_bounds_of_sequences_are_refused(message: str, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"cu_seqlens_q": bounds(0, 4, 10), "cu_seqlens_k": bounds(0, 4, 10)}
    arguments |= {"max_seqlen_q": 6, "max_seqlen_k": 6} | given
    with pytest.raises(UsageError, match=message):
        flash_attn_varlen_func(PACKED, PACKED, PACKED, **arguments)


def test_empty_tensors_give_empty_or_zero_outputs() -> None:
    assert flash_attn_func(Q[:, :0], KV, KV).shape == (2, 0, 4, 16)
    out, lse, _ = flash_attn_func(Q + 1, KV[:, :0], KV[:, :0], return_attn_probs=True)
    assert not bool(out.any())
    assert bool(lse.isneginf().all())
    empty = torch.zeros(0, 2, 16)
    assert flash_attn_varlen_func(empty, PACKED, PACKED, bounds(0, 0), bounds(0, 10), 0, 10).shape == (0, 2, 16)
