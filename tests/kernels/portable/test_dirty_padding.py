"""Tensors that lie in memory full of NaN: no kernel uses what stands around them, or writes there. Ragged lengths and a
head dimension that is padded make tiles reach beyond the tensors on every side."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.backward.fused import BY_ATOMICS
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tests.support.attention.feature_cases import shape_of, tensors
from tests.support.triton_modes import DEVICE, ON_GPU, runs

FORWARD = [
    "flash_fwd",
    "flash_fwd_tma",
    "flash_fwd_general",
    "flash_fwd_sparse",
    "flash_fwd_padded",
    "flash_fwd_transposed",
    "flash_v1",
    "flash_v2",
]
BACKWARD = ["flash_bwd_split", "flash_bwd_fused", "flash_bwd_sparse"]
BLOCK = 64
COLUMNS = (40, 48, 44)
"""With 24 of a head they make rows of which 16, 8 or 4 divide the strides."""
pytestmark = [
    pytest.mark.interpreted,
    runs,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


class Dirt:
    """Tensors inside larger ones of NaN, which have so many columns more."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def around(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values [batch, heads, rows, dim] with NaN behind every row, head and entry."""
        sizes = (*tensor.shape[:-2], tensor.shape[-2] + 130, tensor.shape[-1] + self.columns)
        return self._kept(tensor, tensor.new_full(sizes, float("nan"))[..., : tensor.shape[-2], : tensor.shape[-1]])

    def behind(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, contiguous, with NaN after the last."""
        buffer = tensor.new_full((tensor.numel() + 200,), float("nan"))
        return self._kept(tensor, buffer[: tensor.numel()].view(tensor.shape))

    def untouched(self) -> bool:
        """Whether all that stands around is NaN still."""
        for buffer, view in self._buffers:
            view.fill_(float("nan"))
            if not bool(buffer.isnan().all()):
                return False
        return True

    def _kept(self, tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        assert view._base is not None
        self._buffers.append((view._base, view))
        return view.copy_(tensor)


def problem(kernel: str) -> tuple[AttentionShape, Extras, Extras]:
    """A shape of the kernel, what it gets, and the same for the reference, which knows no block masks."""
    features = {"flash_fwd_general": "softcap window=40:9"}
    shape = shape_of(features.get(kernel, ""), head_dim=24, causal=Causal.LOWER_RIGHT)
    shape = replace(shape, direction=KERNELS[kernel].direction)
    if kernel.endswith("sparse"):
        shown = torch.tensor([[True, False], [True, True]], device=DEVICE)[None, None]
        mask = BlockMask(BLOCK, BLOCK, shown)
        dense = Extras(mask=mask.to_dense(shape.seqlen_q, shape.seqlen_k))
        return replace(shape, features=Features(mask=MaskKind.BLOCK_SPARSE)), Extras(block_mask=mask), dense
    extras = Extras(softcap=1.5) if shape.features.softcap else NO_EXTRAS
    return shape, extras, extras


def reference(shape: AttentionShape, extras: Extras, qkv: Any) -> tuple[torch.Tensor, torch.Tensor]:
    features = replace(shape.features, mask=MaskKind.NONE if extras.mask is None else MaskKind.BOOLEAN)
    return attention_reference(*qkv, causal=shape.causal, dtype=torch.float64, features=features, extras=extras)


def config_of(kernel: str, shape: AttentionShape) -> KernelConfig:
    limits = limits_for((9, 0))
    assert KERNELS[kernel].unsupported(shape, limits) is None
    config = KERNELS[kernel].default_config(shape, limits)
    if ON_GPU or "reduce" not in config.parameters:
        return config
    return KernelConfig.of(kernel, config.parameters | {"reduce": BY_ATOMICS})  # the interpreter has no copy engine


def assert_near(found: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), right.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kernel", FORWARD)
def test_a_forward_keeps_to_its_tensors(kernel: str, columns: int) -> None:
    shape, extras, shown = problem(kernel)
    dirt, qkv = Dirt(columns), tensors(shape)
    right, right_lse = reference(shape, shown, qkv)
    out = dirt.around(torch.zeros_like(right, dtype=torch.float32))
    lse = dirt.behind(torch.zeros_like(right_lse, dtype=torch.float32))
    launch = KERNELS[kernel].bind(config_of(kernel, shape), shape)
    launch(*map(dirt.around, qkv), out, lse, shape.head_dim**-0.5, *((extras,) if shape.features else ()))
    assert_near(out, right)
    assert_near(lse, right_lse)
    assert dirt.untouched()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kernel", BACKWARD)
def test_a_backward_keeps_to_its_tensors(kernel: str, columns: int) -> None:
    """Whatever lies behind the last row takes part in no product: 0 times NaN would be NaN."""
    shape, extras, shown = problem(kernel)
    dirt, qkv = Dirt(columns), [tensor.requires_grad_() for tensor in tensors(shape)]
    right, lse = reference(replace(shape, direction=Direction.FORWARD), shown, qkv)
    dout = torch.randn(right.shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    gradients = torch.autograd.grad(right, qkv, dout.double())
    found = [dirt.around(torch.zeros_like(tensor)) for tensor in qkv]
    inputs = [dirt.around(tensor.detach()) for tensor in (*qkv, right.float())]
    launch = KERNELS[kernel].bind(config_of(kernel, shape), shape)
    launch(*inputs, dirt.behind(lse.detach().float()), dirt.around(dout), *found, shape.head_dim**-0.5,
           *((extras,) if shape.features else ()))  # fmt: skip
    for gradient, wanted in zip(found, gradients, strict=True):
        assert_near(gradient, wanted)
    assert dirt.untouched()
