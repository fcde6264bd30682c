"""The functions of flash-attention 2, 3 and 4: their signatures, what each means, what is refused and how."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import blocktune
import blocktune.flash_attn as package
from blocktune.flash_attn import bert_padding, cute, flash_attn_3, flash_attn_interface
from blocktune.kernels.values.errors import UsageError

pytestmark = pytest.mark.triton_free

SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (
        flash_attn_3.flash_attn_func,
        "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits "
        "pack_gqa deterministic sm_margin return_attn_probs",
    ),
    (
        flash_attn_3.flash_attn_varlen_func,
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv "
        "q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin "
        "return_attn_probs",
    ),
    (
        flash_attn_3.flash_attn_with_kvcache,
        "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
        "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal "
        "window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
        "return_softmax_lse",
    ),
    (
        cute.flash_attn_func,
        "q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa "
        "deterministic score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors "
        "block_sparse_tensors_bwd return_lse",
    ),
    (
        cute.flash_attn_varlen_func,
        "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k "
        "gather_kv_indices page_table softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa "
        "deterministic score_mod score_mod_bwd mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse "
        "scheduler_metadata seqlen_k_per_split disable_scheduler_metadata",
    ),
]


@pytest.mark.parametrize(("function", "names"), SIGNATURES)
def test_arguments_are_in_their_order(function: Callable[..., Any], names: str) -> None:
    positional = [
        name for name, one in inspect.signature(function).parameters.items() if one.kind is not one.KEYWORD_ONLY
    ]
    assert positional == names.split()


def test_the_package_has_flash_attention_2s_names() -> None:
    for name in flash_attn_interface.__all__:
        assert getattr(package, name) is getattr(flash_attn_interface, name) is getattr(blocktune, name)


def dense(grad: bool = True, heads_kv: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, length, heads, 16, requires_grad=grad)
        for length, heads in ((6, 4), (9, heads_kv), (9, heads_kv))
    ]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1), "softcap": 5.0}])
def test_dense_functions_of_3_and_4(options: dict[str, Any]) -> None:
    tensors = dense()
    wanted, sums, _ = blocktune.flash_attn_func(*tensors, return_attn_probs=True, **options)
    third = flash_attn_3.flash_attn_func(*tensors, num_splits=4, pack_gqa=True, return_attn_probs=True, **options)
    fourth = cute.flash_attn_func(*tensors, num_splits=4, pack_gqa=True, return_lse=True, **options)
    for out, lse in (third, fourth):
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(lse, sums)
        torch.autograd.grad(out.sum(), tensors)
    torch.testing.assert_close(flash_attn_3.flash_attn_func(*tensors, **options), third[0])
    assert cute.flash_attn_func(*tensors, **options)[1] is None


def test_the_fourth_has_sinks_and_windows_of_none() -> None:
    tensors, sinks = dense(), torch.randn(4)
    wanted = blocktune.flash_attn_func(*tensors, window_size=(-1, 0), s_aux=sinks)
    out, _ = cute.flash_attn_func(*tensors, window_size=(None, 0), learnable_sink=sinks)
    torch.testing.assert_close(out, wanted)


def packed_pages() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries of two sequences, pages of their keys, where queries begin, how many keys there are, the table."""
    torch.manual_seed(0)
    query, (keys, values) = torch.randn(7, 4, 16), torch.randn(2, 6, 4, 2, 16)
    begins, used = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 3, 7], [5, 10]))
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    return query, keys, values, begins, used, table


def test_packed_queries_over_pages() -> None:
    query, keys, values, begins, used, table = packed_pages()
    rows = [keys_of(pages, table, used) for pages in (keys, values)]
    bounds = torch.tensor([0, 5, 15], dtype=torch.int32)
    wanted = blocktune.flash_attn_varlen_func(query, *rows, begins, bounds, 4, 10, causal=True)
    paged = {"causal": True}
    third = flash_attn_3.flash_attn_varlen_func(
        query, keys, values, begins, None, 4, 12, seqused_k=used, block_table=table, **paged
    )
    cached, lse = flash_attn_3.flash_attn_with_kvcache(
        query, keys, values, cache_seqlens=used, page_table=table, cu_seqlens_q=begins, return_softmax_lse=True, **paged
    )
    fourth, _ = cute.flash_attn_varlen_func(
        query, keys, values, cu_seqlens_q=begins, max_seqlen_q=4, seqused_k=used, page_table=table, **paged
    )
    for out in (third, cached, fourth):
        torch.testing.assert_close(out, wanted)
    assert lse.shape == (4, 7)


def keys_of(pages: Tensor, table: Tensor, used: Tensor) -> Tensor:
    sequences = [pages[row.long()].flatten(0, 1)[:count] for row, count in zip(table, used.tolist(), strict=True)]
    return torch.cat(sequences)


def test_padded_queries_over_a_cache() -> None:
    query, (keys, values) = torch.randn(2, 3, 4, 16), torch.randn(2, 2, 16, 2, 16)
    options = {"cache_seqlens": torch.tensor([4, 9], dtype=torch.int32), "causal": True}
    wanted = blocktune.flash_attn_with_kvcache(query, keys, values, **options)
    torch.testing.assert_close(flash_attn_3.flash_attn_with_kvcache(query, keys, values, **options), wanted)


def test_out_is_written() -> None:
    tensors = dense(grad=False)
    out = torch.empty(2, 6, 4, 16)
    assert flash_attn_3.flash_attn_func(*tensors, out=out) is out
    torch.testing.assert_close(out, blocktune.flash_attn_func(*tensors))
    with pytest.raises(UsageError, match="`out` must be left out"):
        flash_attn_3.flash_attn_func(*dense(), out=out)


def test_8_bit_tensors_take_descales() -> None:
    tensors = [tensor.to(torch.float8_e4m3fn) for tensor in dense(grad=False)]
    descales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    out = flash_attn_3.flash_attn_func(*tensors, None, False, None, *descales)
    plain = [
        (tensor.float() * scale.repeat_interleave(tensor.shape[2] // 2, 1)[:, None, :, None])
        for tensor, scale in zip(tensors, descales, strict=True)
    ]
    torch.testing.assert_close(out.float(), blocktune.flash_attn_func(*plain), rtol=3e-2, atol=3e-2)
    with pytest.raises(UsageError, match="`softcap` is not served"):
        flash_attn_3.flash_attn_func(*tensors, softcap=1.0)
    with pytest.raises(UsageError, match="one length"):
        flash_attn_3.flash_attn_func(*tensors, causal=True)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (flash_attn_3.flash_attn_func, "qv", torch.zeros(1)),
        (flash_attn_3.flash_attn_func, "attention_chunk", 64),
        (flash_attn_3.flash_attn_func, "k_descale", torch.ones(2, 2)),
        (cute.flash_attn_func, "score_mod", max),
        (cute.flash_attn_func, "block_sparse_tensors", (1,)),
    ],
)
def test_what_is_not_served_is_refused_by_name(function: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is not served by blocktune"):
        function(*dense(), **{name: value})


def test_packed_calls_say_what_is_missing() -> None:
    query, keys, values, begins, used, _ = packed_pages()
    with pytest.raises(UsageError, match="need cu_seqlens_q"):
        cute.flash_attn_varlen_func(query, keys[0], values[0])
    with pytest.raises(UsageError, match="cu_seqlens_k or seqused_k"):
        cute.flash_attn_varlen_func(query, keys[0], values[0], cu_seqlens_q=begins, max_seqlen_q=4)
    with pytest.raises(UsageError, match="page_table"):
        flash_attn_3.flash_attn_with_kvcache(query, keys, values, cu_seqlens_q=begins, cache_seqlens=used)


def test_padding_helpers_are_each_others_inverse_and_differentiable() -> None:
    hidden = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]])
    tokens, indices, begins, longest, used = bert_padding.unpad_input(hidden, mask)
    assert (begins.tolist(), begins.dtype, longest, used.tolist()) == ([0, 2, 7, 9], torch.int32, 5, [2, 5, 2])
    again = bert_padding.pad_input(tokens, indices, 3, 5)
    torch.testing.assert_close(again, hidden * mask[:, :, None, None])
    (gradient,) = torch.autograd.grad(again.sum(), hidden)
    torch.testing.assert_close(gradient, mask[:, :, None, None].expand_as(hidden).float())
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    tokens, _, begins, longest, used = bert_padding.unpad_input(hidden, mask, unused)
    assert (len(tokens), begins.tolist(), used.tolist()) == (10, [0, 3, 8, 10], [2, 5, 2])


@pytest.mark.parametrize("causal", [False, True])
def test_padded_sequences_are_packed_and_padded_again_whatever_stands_in_the_padding(causal: bool) -> None:
    mask = torch.tensor([[1] * 7 + [0] * 4, [1] * 11, [1] + [0] * 10])
    hidden = torch.randn(3, 3, 11, 2, 32).masked_fill(mask[None, :, :, None, None] == 0, float("nan"))
    packed = [bert_padding.unpad_input(part, mask) for part in hidden]
    query, key, value = (tokens for tokens, *_ in packed)
    _, indices, begins, longest, used = packed[0]
    out = flash_attn_interface.flash_attn_varlen_func(
        query, key, value, begins, begins, longest, longest, causal=causal
    )
    padded = bert_padding.pad_input(out, indices, 3, 11)
    for entry, length in enumerate(used.tolist()):
        own = [part[entry, :length].transpose(0, 1) for part in hidden]
        right = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=causal).transpose(0, 1)
        torch.testing.assert_close(padded[entry, :length], right)
        assert not padded[entry, length:].any()
