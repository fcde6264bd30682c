"""Configs whose tiles make up the blocks of a block mask: their sizes are no part of a shape, nor of what is tuned."""

from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.selection.fallback import Candidate, Rejection, Rung
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape


def within_blocks(
    candidate: Candidate, block_sizes: tuple[int, int], shape: AttentionShape, limits: ComputeLimits
) -> Candidate | Rejection:
    """Return the candidate with tiles no larger than the blocks (queries, keys). Sizes are powers of two, so that the
    tiles divide the blocks then. A changed config was not measured, and counts as a default."""
    block_q, block_k = block_sizes
    most = {"block_m": block_q, "block_n": block_k, "kv_block_m": block_q, "kv_block_n": block_k}
    parameters = {name: min(value, most.get(name, value)) for name, value in candidate.config.parameters.items()}
    config = KernelConfig.of(candidate.config.kernel, parameters)
    if config == candidate.config:
        return candidate
    problems = get_kernel(config.kernel).violations(config, shape, limits)
    if problems:
        return Rejection(candidate.rung, problems[0])
    return Candidate(rung=Rung.DEFAULT, config=config, origin=Origin.DEFAULT)
