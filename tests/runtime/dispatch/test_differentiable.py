"""Every tensor argument has a gradient, whatever computes the call, or may not require one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from blocktune import UsageError, attention, attention_fp8, flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache
from blocktune.runtime.dispatch import dispatcher, obstacles
from tests.support.attention.entry_points import E4M3, EntryPoint, integers, random
from tests.support.fakes.feature_fakes import pretend_features

pytestmark = pytest.mark.triton_free


@pytest.fixture(params=["fallback", "kernels", "graph"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What computes the calls."""
    if request.param == "kernels":
        pretend_features(monkeypatch)
    if request.param == "graph":
        for module in (obstacles, dispatcher):
            monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
        torch._dynamo.reset()
    attention.reload()
    yield request.param
    attention.reload()


def learnable() -> dict[str, EntryPoint]:
    """Calls in which every tensor of floating-point numbers has a gradient; test_sinks.py has those with sinks."""
    qkv = random(2, 20, 4, 16), random(2, 24, 2, 16), random(2, 24, 2, 16)
    heads = tuple(tensor.transpose(1, 2) for tensor in qkv)
    packed, bounds, slopes = tuple(tensor[0] for tensor in qkv), integers(0, 4, 20), torch.rand(4)

    def windowed(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        found, *_ = flash_attn_func(
            q, k, v, causal=True, window_size=(9, 0), alibi_slopes=slopes, return_attn_probs=True
        )
        assert isinstance(found, Tensor)
        return found

    return {
        "slopes": (windowed, (*qkv, slopes)),
        "slopes of entries": (windowed, (*qkv, torch.rand(2, 4))),
        "slopes of packed sequences": (
            lambda q, k, v, slopes: flash_attn_varlen_func(q, k, v, bounds, bounds, 16, 16, alibi_slopes=slopes),
            (*packed, slopes),
        ),
        "mask": (lambda q, k, v, mask: attention(q, k, v, mask, enable_gqa=True), (*heads, random(1, 4, 20, 24))),
    }


def gradients(function: Any, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = tree_leaves(function(*leaves))[0]
    torch.manual_seed(1)
    return list(torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out.dtype)))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", list(learnable()))
def test_every_tensor_has_its_gradient(name: str, way: str) -> None:
    function, tensors = learnable()[name]
    doubles = tuple(tensor.double() if index < 3 or name == "mask" else tensor for index, tensor in enumerate(tensors))
    wanted = gradients(function, doubles)
    if way == "graph":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(3):  # a kind of call that was served before is served the short way
        for found, right in zip(gradients(function, tensors), wanted, strict=True):
            assert bool(right.any())
            torch.testing.assert_close(found, right.to(found.dtype), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["k", "v", "rotary_cos", "rotary_sin", "alibi_slopes", "s_aux", "k_descale", "v_descale"]
)
def test_a_call_over_a_cache_takes_no_tensor_that_requires_a_gradient(name: str) -> None:
    q, new, cache = random(2, 1, 4, 16), random(2, 1, 2, 16), random(2, 32, 2, 16)
    given: dict[str, Any] = {"k": new, "v": new.clone(), "cache_seqlens": 5, "alibi_slopes": torch.rand(4)}
    given |= {"s_aux": torch.rand(4)}
    if "descale" in name:
        cache = cache.to(E4M3)
        given |= {"k_descale": torch.rand(2), "v_descale": torch.rand(2)}
    else:
        given |= {"rotary_cos": torch.rand(40, 4), "rotary_sin": torch.rand(40, 4)}
    given[name].requires_grad_()
    with pytest.raises(UsageError, match="computes no gradients"):
        flash_attn_with_kvcache(q, cache.clone(), cache.clone(), **given)
    with torch.no_grad():
        flash_attn_with_kvcache(q, cache.clone(), cache.clone(), **given)


@pytest.mark.parametrize("name", ["scale_q", "scale_k", "scale_v"])
def test_scales_of_8_bit_tensors_may_not_require_a_gradient(name: str) -> None:
    q = random(1, 2, 8, 16).to(E4M3)
    with pytest.raises(UsageError, match="has no gradients"):
        attention_fp8(q, q, q, **{name: torch.ones(2, requires_grad=True)})
