"""The blocks of plain steps, and problems that the ladder teaches well, with the device and the kernels that show it.

ladder = climb(preset.shape, device, compiler=farm, preset=preset)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.compare.ladder_ideas import PLAIN, TUNED, V2
from blocktune.tuner.compare.ladder_steps import kernels_of
from blocktune.tuner.compile_server.background import Compiler
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.occupancy.calculator import occupancy

COMMON_BLOCKS = ((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1))
"""(block_m, block_n, num_warps, num_stages) that the plain steps share, best first; v1 has one stage in any case."""

AS_FIRST_WRITTEN = {"schedule": 0, "reduce": 0}
"""The parameters of a kernel's own that a plain step sets: computed in order, dQ added by the threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A problem on a device.

    device: its name in the catalogue. blocks: (block_m, block_n, num_warps, num_stages) of the steps that share them.
    kernels: of the steps that take other kernels than usual; those of `tuned` are tuned by the model. teaches: what to
    look at.
    """

    device: str
    shape: AttentionShape
    blocks: tuple[int, int, int, int]
    kernels: Mapping[str, tuple[str, ...]] = field(hash=False)
    teaches: str


PRESETS = {
    "rtx2070": Preset(
        device="rtx2070",
        shape=AttentionShape(
            batch=10, num_heads=64, num_heads_kv=64, seqlen_q=1024, seqlen_k=1024, head_dim=32, head_dim_v=32,
            dtype="float32",
        ),
        blocks=(32, 32, 4, 1),
        kernels={V2: ("flash_v2",), TUNED: ("flash_fwd", "flash_fwd_transposed")},
        teaches="v2 moves a small part of v1's bytes and fills the SMs with blocks, yet every load of a key waits for "
        "banks that its neighbours read: rows of 128 bytes begin in the same bank. Transposed keys end that.",
    ),
}  # fmt: skip
"""By name."""


MODEL_TRIES = 6
"""Configs of a kernel that are compiled besides its default, where the model tunes."""


def tuned_by_model(
    kernels: Sequence[AttentionKernel], preset: Preset, device: DeviceSpec, compiler: Compiler
) -> KernelConfig:
    """Return the config of these kernels that the model expects to be the fastest: of their defaults, those with the
    blocks of the other steps, and those that look fastest before they are compiled."""
    shape = preset.shape
    tried = [(kernel, config) for kernel in kernels for config in _promising(kernel, preset, device)]
    results = [compiler.submit(kernel.name, config, shape, device.limits.cc) for kernel, config in tried]

    def predicted_us(place: int) -> float:
        kernel, config = tried[place]
        code = results[place].result().code
        fits = code is not None and occupancy(code.resources, device.limits).blocks_per_sm > 0
        return predict_us(kernel, config, shape, device, code) if code is not None and fits else math.inf

    return tried[min(range(len(tried)), key=predicted_us)][1]


def _promising(kernel: AttentionKernel, preset: Preset, device: DeviceSpec) -> list[KernelConfig]:
    """Return the default of a kernel, its config with the blocks of the other steps, and the best of its configs by
    what is known before a compile."""
    shape, limits = preset.shape, device.limits
    named = kernel.default_config(shape, limits), plain_config(kernel, preset.blocks, shape, limits)
    feasible = SearchSpace.build(shape, limits, [kernel]).feasible
    ordered = sorted(feasible, key=lambda config: usefulness(kernel, config, shape, device))
    return list(dict.fromkeys((*named, *ordered[:MODEL_TRIES])))


def common_blocks(shape: AttentionShape, limits: ComputeLimits) -> tuple[int, int, int, int]:
    """Return the first common blocks that every step that runs at all can run."""
    kernels = [kernels_of(name, shape.direction)[0] for name in PLAIN[shape.direction]]
    able = [kernel for kernel in kernels if kernel.unsupported(shape, limits) is None]

    def fits(blocks: tuple[int, int, int, int]) -> bool:
        return all(not kernel.violations(_with_blocks(kernel, blocks, shape, limits), shape, limits) for kernel in able)

    return next(filter(fits, COMMON_BLOCKS), COMMON_BLOCKS[-1])


def _with_blocks(
    kernel: AttentionKernel, blocks: tuple[int, int, int, int], shape: AttentionShape, limits: ComputeLimits
) -> KernelConfig:
    """Return the kernel's default with these blocks, as the algorithm was first written."""
    m, n, warps, stages = blocks
    own = kernel.default_config(shape, limits).parameters
    most = max(kernel.parameters["num_stages"])
    given = {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": min(stages, most)}
    plain = {name: value for name, value in AS_FIRST_WRITTEN.items() if name in own}
    return KernelConfig.of(kernel.name, own | given | plain)


def plain_config(
    kernel: AttentionKernel, blocks: tuple[int, int, int, int], shape: AttentionShape, limits: ComputeLimits
) -> KernelConfig:
    """Return the kernel's default with these blocks, or the default itself if it cannot run with them."""
    wanted = _with_blocks(kernel, blocks, shape, limits)
    return kernel.default_config(shape, limits) if kernel.violations(wanted, shape, limits) else wanted
