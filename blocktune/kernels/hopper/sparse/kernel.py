"""The Hopper backward under a block mask: only the blocks of the mask are copied and computed.

A block of the grid walks a list of the blocks of queries that see its 128 keys (lists.py), instead of all from a first
to a last one, and two warps of their own add dQ (adders.py): the warpgroups need not know which block they compute
unless it is masked.
"""

from typing import ClassVar

from blocktune.kernels.base.loops import BackwardLoops, Visits
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hopper.backward.kernel import FlashBackwardHopper
from blocktune.kernels.hopper.backward.layout import is_wide
from blocktune.kernels.hopper.sparse.launch import HopperSparseBackwardLaunch
from blocktune.kernels.portable.forward.sparse import mask_problem
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape


class FlashBackwardHopperSparse(FlashBackwardHopper):
    """`FlashBackwardHopper` for block masks, heads up to 128 and blocks of 64 or more, which a launch checks."""

    name = "flash_bwd_hopper_sparse"
    ladder_steps: ClassVar[tuple[str, ...]] = ()
    loops = BackwardLoops(rewrites_lse=True, parts="group_parts", visits=Visits.BLOCK_MASK)
    features: ClassVar[frozenset[str]] = frozenset({str(MaskKind.BLOCK_SPARSE), "deterministic"})

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        problem = mask_problem(self, shape) or super().shape_problem(shape, limits)
        if problem is None and is_wide(shape):
            problem = f"{self.name} computes heads up to 128, but got {max(shape.head_dim, shape.head_dim_v)}"
        return problem

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        problems = super().rule_violations(config, shape, limits)
        if problems or config.parameters["persistent"]:
            return problems
        return (f"`persistent` 1 of {self.name} must hold: warps of their own add dQ.",)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> HopperSparseBackwardLaunch:
        launch = super().bind(config, shape)
        return HopperSparseBackwardLaunch(shape, launch.sizes, launch.options)
