"""Wrong calls of flash-attention's functions raise the types of error that it raises; numbers may be of any library.

flash-attention 2 checks values, sizes and data types by TORCH_CHECK, which is a RuntimeError; asks tensors for
dimensions that they may not have, which is an IndexError; and takes its arguments through schemas: a TypeError.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blocktune import UsageError, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, tree_attention
from blocktune.kernels.values.errors import TooFewDimensionsError, WrongTypeError
from blocktune.kernels.values.features import Features
from blocktune.runtime.dispatch.call import Call

pytestmark = pytest.mark.triton_free

torch.manual_seed(0)
Q, K = torch.randn(2, 8, 4, 16), torch.randn(2, 12, 2, 16)
PACKED = torch.randn(10, 2, 16)
BOUNDS = torch.tensor([0, 4, 10], dtype=torch.int32)
CACHE = torch.randn(2, 32, 2, 16)
PAGES = torch.zeros(2, 2, dtype=torch.int32)


def func(**changes: Any) -> Any:
    return flash_attn_func(**{"q": Q, "k": K, "v": K} | changes)


def varlen(**changes: Any) -> Any:
    given = {"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}
    return flash_attn_varlen_func(**given | {"max_seqlen_q": 6, "max_seqlen_k": 6} | changes)


def cache(**changes: Any) -> Any:
    return flash_attn_with_kvcache(**{"q": Q, "k_cache": CACHE, "v_cache": CACHE} | changes)


def tree(**changes: Any) -> Any:
    given = {"query": Q.transpose(1, 2), "key_cache": CACHE, "value_cache": CACHE}
    words = torch.ones(2, 8, 1, dtype=torch.int32)
    return tree_attention(**given | {"tree_mask": words, "cache_seqlens": PAGES[:, 0] + 20} | changes)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: list[tuple[Callable[..., Any], dict[str, Any], type[Exception]]] = [
    (func, {"dropout_p": 1.0}, RuntimeError),
    (func, {"dropout_p": -0.1}, RuntimeError),
    (func, {"softcap": float("nan")}, RuntimeError),
    (func, {"k": K.half()}, RuntimeError),
    (func, {"k": K.to("meta")}, RuntimeError),
    (func, {"q": Q.int(), "k": K.int(), "v": K.int()}, RuntimeError),
    (func, {"k": K[..., :8]}, RuntimeError),
    (func, {"q": Q[:, :, :3]}, RuntimeError),
    (func, {"v": K[:, :8]}, RuntimeError),
    (func, {"q": Q[None]}, RuntimeError),
    (func, {"alibi_slopes": torch.ones(3)}, RuntimeError),
    (func, {"window_size": (1, 2, 3)}, RuntimeError),
    (func, {"window_size": (-2, 0)}, RuntimeError),
    (varlen, {"window_size": (0, -(2**70))}, RuntimeError),
    (cache, {"window_size": (-3, -7)}, RuntimeError),
    (func, {"q": Q[0]}, IndexError),
    (func, {"k": K[0, 0]}, IndexError),
    (func, {"q": [1.0]}, TypeError),
    (func, {"v": K.numpy()}, TypeError),
    (func, {"v": None}, TypeError),
    (func, {"window_size": 3}, TypeError),
    (func, {"window_size": None}, TypeError),
    (func, {"window_size": (1.5, 0)}, TypeError),
    (func, {"window_size": (torch.tensor(1.5), 0)}, TypeError),
    (func, {"dropout_p": "0.1"}, TypeError),
    (func, {"dropout_p": None}, TypeError),
    (func, {"softcap": "1"}, TypeError),
    (func, {"softmax_scale": "1"}, TypeError),
    (func, {"softmax_scale": [1.0]}, TypeError),
    (varlen, {"q": PACKED[0]}, IndexError),
    (varlen, {"v": PACKED[0, 0]}, IndexError),
    (varlen, {"q": PACKED[None]}, RuntimeError),
    (varlen, {"cu_seqlens_q": BOUNDS.long()}, RuntimeError),
    (varlen, {"cu_seqlens_q": BOUNDS[None]}, RuntimeError),
    (varlen, {"cu_seqlens_k": [0, 4, 10]}, TypeError),
    (varlen, {"max_seqlen_q": 5}, RuntimeError),
    (varlen, {"max_seqlen_k": -1}, RuntimeError),
    (varlen, {"max_seqlen_k": 6.5}, TypeError),
    (varlen, {"max_seqlen_k": None}, TypeError),
    (cache, {"q": Q[0]}, IndexError),
    (cache, {"k_cache": CACHE[0]}, IndexError),
    (cache, {"block_table": PAGES[0]}, IndexError),
    (cache, {"block_table": PAGES.long()}, RuntimeError),
    (cache, {"block_table": PAGES + 2}, RuntimeError),
    (cache, {"block_table": PAGES - 1}, RuntimeError),
    (cache, {"cache_seqlens": numbers(1, 33)}, RuntimeError),
    (cache, {"cache_seqlens": numbers(1, 65), "block_table": PAGES}, RuntimeError),
    (cache, {"cache_seqlens": 33}, RuntimeError),
    (cache, {"cache_seqlens": -1}, RuntimeError),
    (cache, {"cache_seqlens": 2**31}, RuntimeError),
    (cache, {"cache_seqlens": 2**70}, RuntimeError),
    (cache, {"cache_seqlens": 32, "k": K[:, :1], "v": K[:, :1]}, RuntimeError),
    (cache, {"num_splits": 2**70}, RuntimeError),
    (cache, {"cache_seqlens": "33"}, TypeError),
    (cache, {"k": K[:, :1]}, RuntimeError),
    (cache, {"k": K[:, 0], "v": K[:, 0]}, IndexError),
    (cache, {"window_size": (None, None)}, TypeError),
    (tree, {"query": Q[0]}, IndexError),
    (tree, {"key_cache": CACHE[0]}, IndexError),
    (tree, {"cache_seqlens": numbers(20, 33)}, RuntimeError),
]


@pytest.mark.parametrize(("entry", "given", "error"), WRONG)
def test_a_wrong_call_raises_what_flash_attention_would(
    entry: Callable[..., Any], given: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(UsageError) as refused:
        entry(**given)
    kinds = {IndexError: TooFewDimensionsError, TypeError: WrongTypeError}
    assert refused.type is kinds.get(error, UsageError)
    assert isinstance(refused.value, error)
    assert refused.value.exit_code == 2, "that of the command line"
    assert str(refused.value).rstrip(".").count(". ") >= 1, "rule and values, then the way out"


@pytest.mark.parametrize(
    "window", [[3, 1], (np.int64(3), np.int32(1)), torch.tensor([3, 1]), (torch.tensor(3), 1), np.array([3, 1])]
)
@pytest.mark.parametrize("entry", [func, varlen, cache])
def test_a_window_may_hold_whole_numbers_of_any_kind(entry: Callable[..., Any], window: Any) -> None:
    torch.testing.assert_close(entry(window_size=window), entry(window_size=(3, 1)), rtol=0.0, atol=0.0)
    nothing = (torch.tensor(-1), np.int64(-1))
    torch.testing.assert_close(entry(window_size=nothing), entry(), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor])
def test_other_numbers_may_be_of_any_kind(number: Callable[[float], Any]) -> None:
    options = {"softmax_scale": 0.5, "softcap": 2.0}
    given = {name: number(value) for name, value in options.items()}
    for entry in (func, varlen, cache):
        torch.testing.assert_close(entry(**given), entry(**options), rtol=0.0, atol=0.0)
    plain = func(softmax_scale=number(0.5), dropout_p=number(0.0), causal=np.bool_(True), softcap=0)
    torch.testing.assert_close(plain, func(softmax_scale=0.5, causal=True), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("number", [np.int32, torch.tensor])
def test_lengths_may_be_of_any_kind(number: Callable[[int], Any]) -> None:
    torch.testing.assert_close(varlen(max_seqlen_q=number(6), max_seqlen_k=number(6)), varlen(), rtol=0.0, atol=0.0)
    torch.testing.assert_close(cache(cache_seqlens=np.int32(20)), cache(cache_seqlens=20), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("length", [7, 2**31 - 1, 2**31, 2**63, 2**70, np.uint64(2**63)])
def test_a_longest_sequence_may_be_longer_than_there_are_tokens(length: Any) -> None:
    torch.testing.assert_close(varlen(max_seqlen_q=length, max_seqlen_k=length), varlen(), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("entry", [func, varlen, cache])
def test_a_wrong_window_is_called_by_its_name(entry: Callable[..., Any]) -> None:
    for window in ((-3, -7), (0, -2), (1, 2, 3)):
        with pytest.raises(UsageError, match=r"^`window_size` must be"):
            entry(window_size=window)


def test_a_number_of_rows_is_checked_in_every_call() -> None:
    cache(cache_seqlens=20)
    for rows in (-1, 33, 2**31):
        with pytest.raises(UsageError, match=f"`0 <= cache_seqlens <= 32` must hold with 0 new rows, but got {rows}"):
            cache(cache_seqlens=rows)


def test_a_switch_may_be_a_number_as_for_flash_attention() -> None:
    assert Call.of(causal="none", scale=1.0, deterministic=1).features == Features(deterministic=True)
