"""PyTorch's own samples of scaled_dot_product_attention, with the provider active and without."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.provider import PROVIDER
from blocktune.runtime.provider.registration import register_provider

pytestmark = pytest.mark.gpu

BOUNDS = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-4}
"""Largest difference from float64, in parts of the largest number: PyTorch's own tests allow as much."""

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@pytest.fixture(scope="module")
def samples() -> Any:
    """PyTorch's description of the function, which draws its samples."""
    pytest.importorskip("expecttest", reason="PyTorch's tests need expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


@contextmanager
def provider() -> Iterator[None]:
    register_provider()
    activate_flash_attention_impl(PROVIDER)
    try:
        yield
    finally:
        restore_flash_attention_impl(_raise_warn=False)


def results(tensors: list[Tensor], options: dict[str, Any], backends: list[SDPBackend]) -> list[Tensor]:
    """The output and the gradients, with the seed of dropout fixed."""
    torch.manual_seed(5)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    with sdpa_kernel(backends, set_priority=True):
        out = scaled_dot_product_attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", BACKENDS[:3])
def test_pytorchs_samples(samples: Any, dtype: torch.dtype, first: SDPBackend) -> None:
    order = [first, *(backend for backend in BACKENDS if backend is not first)]
    count = 0
    for sample in samples.sample_inputs("cuda", dtype, requires_grad=True):
        tensors, options = [sample.input, *sample.args[:2]], dict(sample.kwargs)
        options |= {"attn_mask": sample.args[2]} if len(sample.args) > 2 else {}
        plain = results(tensors, options, order)
        with provider():
            ours = results(tensors, options, order)
        if options.get("dropout_p"):
            assert all(map(torch.equal, ours, plain))  # PyTorch's kernels compute dropout
        doubles = {key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
                   for key, value in options.items()}  # fmt: skip
        if not options.get("dropout_p"):
            exact = results([tensor.double() for tensor in tensors], doubles, [SDPBackend.MATH])
            for one, right in zip(ours, exact, strict=True):
                assert (one.double() - right).abs().max() <= BOUNDS[dtype] * right.abs().max().clamp_min(1e-3)
        count += 1
    assert count > 10
