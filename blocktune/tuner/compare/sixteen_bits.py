"""The 16-bit forward over the numbers of 8-bit tensors: what 8 bits are compared with."""

from dataclasses import replace

import torch

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import competing, get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.compare.peers import Compute, own_compute
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion

SIXTEEN_BITS = "bfloat16"


def sixteen_bits(shape: AttentionShape) -> AttentionShape:
    """Return the same shape in bfloat16, which holds every e4m3 number."""
    return replace(shape, dtype=SIXTEEN_BITS)


def sixteen_bit_config(shape: AttentionShape, device: DeviceSpec) -> KernelConfig:
    """Return the default config of the same shape in bfloat16."""
    return find_contenders(sixteen_bits(shape), device, competing(), ()).default


def sixteen_bit_compute(shape: AttentionShape, question: AnyQuestion, config: KernelConfig) -> Compute:
    """Return a launch of the config over the question's tensors, which are converted once, ahead of all timing."""
    wide = sixteen_bits(shape)
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (question.q, question.k, question.v))
    run = own_compute(get_kernel(config.kernel).bind(config, wide), wide, question.new_result())
    return lambda *_: run(q, k, v)
