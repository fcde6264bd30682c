"""Kernels for either direction of calls with features, without a GPU."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from blocktune.kernels import registry
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.dispatch import dispatcher, obstacles, resolver
from blocktune.runtime.dispatch.torch_math import autograd_within_an_op
from tests.support.fakes.dispatch_fakes import H200, PlainKernel

SERVED = frozenset(("window", "softcap", "alibi", "boolean", "additive", "dropout", "varlen", "block_sparse"))


def attended(q: Any, k: Any, v: Any, scale: float, shape: AttentionShape, extras: Extras) -> Any:
    """Output and log-sum-exp of a launch; a block mask as the boolean one that it stands for."""
    features = replace(shape.features, deterministic=False)
    if extras.block_mask is not None:
        features = replace(features, mask=MaskKind.BOOLEAN)
        extras = replace(extras, mask=extras.block_mask.to_dense(shape.seqlen_q, shape.seqlen_k), block_mask=None)
    with torch.autocast("cpu", enabled=False):  # no kernel knows of it
        return attention_reference(q, k, v, causal=shape.causal, scale=scale, features=features, extras=extras)


def pretend_features(monkeypatch: pytest.MonkeyPatch) -> "tuple[FeatureForward, FeatureBackward]":
    """The CPU as an H200 with a kernel for either direction that serves all features; both are returned."""
    both = FeatureForward(), FeatureBackward()
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel for kernel in both})
    for module in (obstacles, dispatcher):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    return both


class FeatureForward(PlainKernel):
    """Remembers the shape and the extras of every launch."""

    features: ClassVar[frozenset[str]] = SERVED
    smallest_block: ClassVar[int] = 0
    """Masks with smaller blocks do not launch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[AttentionShape, Extras]] = []

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
            self.note(config, shape, extras)
            right, sums = attended(q, k, v, scale, shape, extras)
            out.copy_(right)
            if lse is not None:
                lse.copy_(sums)

        return launch

    def note(self, config: KernelConfig, shape: AttentionShape, extras: Extras) -> None:
        if config in self.broken:
            raise RuntimeError("out of resource: shared memory")
        if extras.block_mask is not None and extras.block_mask.block_q < self.smallest_block:
            raise UsageError("the tiles do not divide the blocks")
        assert extras.mask is None or extras.mask.shape[3] == shape.seqlen_k  # kernels read as many keys
        self.launched.append(config)
        self.seen.append((shape, extras))


class FeatureBackward(FeatureForward):
    """Gradients by autograd; output and log-sum-exp must be those that the forward left."""

    name: ClassVar[str] = "plain_bwd"
    direction: ClassVar[Direction] = Direction.BACKWARD
    features: ClassVar[frozenset[str]] = SERVED | {"deterministic"}

    def default_config(self, shape: AttentionShape, limits: Any) -> KernelConfig:
        return KernelConfig(self.name, 64, 32, 4, 2)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        def launch(
            q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
            extras: Extras = NO_EXTRAS,
        ) -> None:  # fmt: skip
            self.note(config, shape, extras)
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            with torch.enable_grad(), autograd_within_an_op():
                right, sums = attended(*leaves, scale, shape, extras)
                found = torch.autograd.grad(right, leaves, dout.to(right.dtype))
            rows = dout.any(-1)  # a trial has few, or none, and no output in others
            torch.testing.assert_close(out[rows], right.detach().to(out.dtype)[rows])
            torch.testing.assert_close(lse[rows.view(lse.shape)], sums.detach()[rows.view(lse.shape)])
            for gradient, own in zip((dq, dk, dv), found, strict=True):
                gradient.copy_(own)

        return launch
