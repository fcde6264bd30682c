"""Packed queries over pages, PyTorch's function of packed sequences and the functions of packed tensors, against their
definition in float64: PyTorch's mathematics on the CPU, our kernels on a GPU."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import (
    UsageError,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    varlen_attn,
)
from blocktune.runtime.dispatch import torch_math
from tests.runtime.api.test_flash_api import DEVICES, assert_ours, assert_right, defined, exact, no_plans, random

pytestmark = pytest.mark.triton_free

__all__ = ["no_plans"]  # a fixture of every test

PREFILL = (7, 0, 40, 1)
"""Lengths of which one is too long to be padded."""
DECODE = (1, 0, 3, 1)
KEYS = (50, 5, 47, 0)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (9, 0), "softmax_scale": 0.2},
    {"window_size": (5, 3), "softcap": 4.0},
    {"causal": True, "alibi_slopes": True},
]


def bounds(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def pages_of(size: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of keys and of values, and a table of four sequences."""
    count = -(-max(KEYS) // size)
    k, v = (random(4 * count + 2, size, 2, 64, device=device) for _ in range(2))
    return k, v, torch.randperm(4 * count + 2, device=device)[: 4 * count].view(4, count).int()


def right_of(q: Tensor, lengths: tuple[int, ...], keys: list[tuple[Tensor, Tensor]], **options: Any) -> Any:
    """Output [tokens, heads, dim] and log-sum-exp [heads, tokens] of the sequences, 0 and -inf after them."""
    parts = q.split([*lengths, q.shape[0] - sum(lengths)])
    found = [defined(part, *own, **options) for part, own in zip(parts, keys, strict=False)]
    out = torch.cat([*(one for one, _ in found), torch.zeros(*parts[-1].shape[:2], keys[0][1].shape[-1])])
    return out, torch.cat([*(lse for _, lse in found), torch.full(parts[-1].shape[1::-1], float("-inf"))], 1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL])
@pytest.mark.parametrize("device", DEVICES)
def test_packed_queries_read_pages(device: str, lengths: tuple[int, ...], size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, (k, v, table) = random(sum(lengths) + 2, 4, 64, device=device), pages_of(size, device)
    if options.get("alibi_slopes"):
        options = options | {"alibi_slopes": torch.rand(4, device=device)}
    starts = bounds(lengths, device), bounds(KEYS, device)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, *starts, max(lengths), max(KEYS), block_table=table, return_attn_probs=True, **options
    )
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    keys = [
        tuple(pages[own.long()].flatten(0, 1)[:length].double().cpu() for pages in (k, v))
        for own, length in zip(table, KEYS, strict=True)
    ]
    right, sums = right_of(q.double().cpu(), lengths, keys, **on_cpu)
    assert_right(out, right, device)
    assert lse.shape == (4, q.shape[0])
    torch.testing.assert_close(lse.double().cpu(), sums, atol=2e-2 if device == "cuda" else 1e-5, rtol=1e-2)
    assert_ours(device)


@pytest.mark.parametrize("lengths", [DECODE, PREFILL])
@pytest.mark.parametrize("device", DEVICES)
def test_pages_have_gradients(device: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, (k, v, table) = random(sum(lengths), 4, 64, device=device), pages_of(16, device)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    starts = bounds(lengths, device), bounds(KEYS, device)
    out = flash_attn_varlen_func(*leaves, *starts, max(lengths), max(KEYS), causal=True, block_table=table)
    doubles = exact(*leaves)
    keys = [
        tuple(pages[own.long()].flatten(0, 1)[:length] for pages in doubles[1:])
        for own, length in zip(table.cpu(), KEYS, strict=True)
    ]
    right, _ = right_of(doubles[0], lengths, keys, causal=True)
    grad = torch.randn_like(out)
    got, wanted = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(right, doubles, grad.double().cpu())
    for one, other in zip(got, wanted, strict=True):
        assert_right(one, other, device)


@pytest.mark.parametrize("lengths", [DECODE, PREFILL])
@pytest.mark.parametrize("device", DEVICES)
def test_pairs_are_dropped_over_pages(device: str, lengths: tuple[int, ...]) -> None:
    """Those that are dropped over keys in one piece."""
    torch.manual_seed(0)
    q, (k, v, table) = random(sum(lengths), 4, 64, device=device), pages_of(16, device)
    keys = [
        torch.cat([pages[own.long()].flatten(0, 1)[:length] for own, length in zip(table, KEYS, strict=True)])
        for pages in (k, v)
    ]
    arguments = bounds(lengths, device), bounds(KEYS, device), max(lengths), max(KEYS)
    found = []
    for tensors, pages in ((keys, None), ((k, v), table)):
        torch.manual_seed(1)
        found.append(flash_attn_varlen_func(q, tensors[0], tensors[1], *arguments, dropout_p=0.5, block_table=pages))
    torch.testing.assert_close(found[1], found[0])
    kept = flash_attn_varlen_func(q, k, v, *arguments, block_table=table)
    assert not torch.allclose(found[1], kept, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("lengths", "compiled"), [(DECODE, False), (PREFILL, False), (PREFILL, True)])
def test_pytorch_computes_scores_of_the_keys_alone(
    lengths: tuple[int, ...], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of all rows that a wide table has room for."""
    q, (k, v, _) = random(sum(lengths), 4, 64, device="cpu"), pages_of(16, "cpu")
    table, sizes = torch.zeros(4, 1000, dtype=torch.int32), []

    def notice(query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        sizes.append(key.shape[2])
        return definition(query, key, *others)

    definition = torch_math._attend_dense
    monkeypatch.setattr(torch_math, "_attend_dense", notice)
    function = torch.compile(flash_attn_varlen_func, backend="eager") if compiled else flash_attn_varlen_func
    function(q, k, v, bounds(lengths), bounds(KEYS), max(lengths), max(KEYS), causal=True, block_table=table)
    assert sizes[-1] == len(KEYS) * max(KEYS)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("page < 3", {"block_table": torch.tensor([[0, 3]], dtype=torch.int32)}),
        ("`block_table` must be int32", {"block_table": torch.zeros(1, 2)}),
        ("`block_table` must be int32", {"block_table": torch.zeros(2, 2, dtype=torch.int32)}),
        ("num_heads % num_heads_kv", {"k": torch.zeros(3, 16, 3, 16), "v": torch.zeros(3, 16, 3, 16)}),
        ("4 dimensions", {"k": torch.zeros(48, 2, 16)}),
    ],
)
def test_wrong_pages_are_refused(message: str, given: dict[str, Any]) -> None:
    pages = torch.zeros(3, 16, 2, 16)
    arguments: dict[str, Any] = {"k": pages, "v": pages, "block_table": torch.tensor([[0, 1]], dtype=torch.int32)}
    arguments |= {"cu_seqlens_q": bounds((3,)), "cu_seqlens_k": bounds((20,)), "max_seqlen_q": 3, "max_seqlen_k": 20}
    with pytest.raises(UsageError, match=message):
        flash_attn_varlen_func(torch.zeros(3, 4, 16), **arguments | given)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (4, 2)])
@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_pytorchs_function_of_packed_sequences(device: str, num_splits: int | None, window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lengths, used = (7, 3, 19), (11, 2, 24)
    q, (k, v) = random(29, 4, 64, device=device), (random(45, 2, 64, device=device) for _ in range(2))
    starts = bounds(lengths, device), bounds((12, 9, 24), device)
    given: dict[str, Any] = {"seqused_k": torch.tensor(used, dtype=torch.int32, device=device), "enable_gqa": True}
    given |= {"window_size": window, "num_splits": num_splits, "return_aux": SimpleNamespace(lse=True), "scale": 0.3}
    out, lse = varlen_attn(q, k, v, *starts, 19, 24, **given)
    keys = [
        tuple(tensor[start : start + length].double().cpu() for tensor in (k, v))
        for start, length in zip((0, 12, 21), used, strict=True)
    ]
    options = {"causal": window[1] == 0, "window_size": window, "softmax_scale": 0.3}
    right, sums = right_of(q.double().cpu(), lengths, keys, **options)
    assert_right(out, right, device)
    torch.testing.assert_close(lse.double().cpu(), sums, atol=2e-2 if device == "cuda" else 1e-5, rtol=1e-2)
    assert_ours(device)


@pytest.mark.parametrize("device", DEVICES)
def test_pytorchs_function_reads_pages(device: str) -> None:
    torch.manual_seed(0)
    q, (k, v, table) = random(sum(DECODE), 2, 64, device=device), pages_of(16, device)
    used = torch.tensor(KEYS, dtype=torch.int32, device=device)
    out = varlen_attn(
        q, k, v, bounds(DECODE, device), None, 3, 50, seqused_k=used, block_table=table, window_size=(-1, 0)
    )
    own = flash_attn_varlen_func(
        q, k, v, bounds(DECODE, device), bounds(KEYS, device), 3, 50, block_table=table, causal=True
    )
    assert torch.equal(out, own)


def test_pytorchs_function_has_our_arguments() -> None:
    """Where the installed PyTorch has the function."""
    theirs = pytest.importorskip("torch.nn.attention.varlen")
    ours = inspect.signature(varlen_attn).parameters
    assert set(inspect.signature(theirs.varlen_attn).parameters) <= set(ours)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("Pass enable_gqa=True", {"enable_gqa": False}),
        ("`seqused_k` must be int32", {"seqused_k": torch.zeros(2, dtype=torch.int32)}),
        ("`cu_seq_k` is required", {"cu_seq_k": None}),
        ("needs cu_seq_k", {"cu_seq_k": None, "seqused_k": torch.ones(1, dtype=torch.int32)}),
        ("needs seqused_k", {"block_table": torch.zeros(1, 1, dtype=torch.int32)}),
    ],
)
def test_wrong_calls_of_pytorchs_function_are_refused(message: str, given: dict[str, Any]) -> None:
    key = torch.zeros(5, 2, 16)
    arguments: dict[str, Any] = {"cu_seq_q": bounds((3,)), "cu_seq_k": bounds((5,)), "max_q": 3, "max_k": 5}
    with pytest.raises(UsageError, match=message):
        varlen_attn(torch.zeros(3, 4, 16), key, key, **arguments | {"enable_gqa": True} | given)


@pytest.mark.gpu
def test_with_fixed_splits_a_sequence_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    lengths = tuple(torch.randint(1, 700, (40,)).tolist())
    q, k, v = (random(sum(lengths), heads, 128, device="cuda") for heads in (16, 4, 4))
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}
    starts = bounds(lengths, "cuda")
    whole = varlen_attn(q, k, v, starts, starts, max(lengths), max(lengths), **options)
    for number in (0, 11, 39):
        own = slice(int(starts[number]), int(starts[number + 1]))
        single, length = bounds((lengths[number],), "cuda"), lengths[number]
        alone = varlen_attn(q[own], k[own], v[own], single, single, length, length, **options)
        assert torch.equal(alone, whole[own])
    assert_ours("cuda")


@pytest.mark.parametrize("options", [{}, {"causal": True, "return_attn_probs": True, "softcap": 3.0}])
@pytest.mark.parametrize("device", DEVICES)
def test_packed_tensors_are_their_parts(device: str, options: dict[str, Any]) -> None:
    qkv, q = random(2, 24, 3, 4, 32, device=device), random(2, 24, 4, 32, device=device)
    parts, starts = qkv.unbind(2), bounds((24, 24), device)
    wanted = flash_attn_func(*parts, **options)
    assert_same(flash_attn_qkvpacked_func(qkv, **options), wanted)
    assert_same(flash_attn_kvpacked_func(parts[0], qkv[:, :, 1:], **options), wanted)
    wanted = flash_attn_varlen_func(
        q.flatten(0, 1), *(part.flatten(0, 1) for part in parts[1:]), starts, starts, 24, 24, **options
    )
    packed = qkv.flatten(0, 1)
    found = flash_attn_varlen_kvpacked_func(q.flatten(0, 1), packed[:, 1:], starts, starts, 24, 24, **options)
    assert_same(found, wanted)
    packed[:, 0] = q.flatten(0, 1)
    assert_same(flash_attn_varlen_qkvpacked_func(packed, starts, 24, **options), wanted)
    with pytest.raises(UsageError, match="must hold 3 tensors"):
        flash_attn_qkvpacked_func(qkv[:, :, 1:])


def assert_same(found: Any, wanted: Any) -> None:
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for one, other in pairs:
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("lengths", [DECODE, PREFILL])
def test_a_compiled_graph_reads_pages(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, (k, v, table) = random(sum(lengths) + 2, 4, 64, device="cpu"), pages_of(16, "cpu")
    starts = bounds(lengths), bounds(KEYS)
    options: dict[str, Any] = {"block_table": table, "causal": True, "s_aux": torch.randn(4)}
    compiled = torch.compile(flash_attn_varlen_func, backend="eager", fullgraph=True)
    found, wanted = (
        function(q, k, v, *starts, max(lengths), max(KEYS), **options)
        for function in (compiled, flash_attn_varlen_func)
    )
    torch.testing.assert_close(found, wanted)
