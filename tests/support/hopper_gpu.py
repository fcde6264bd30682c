"""Tests on a GPU of what runs on Hopper alone."""

import pytest
import torch

from blocktune.kernels.base.kernel import AttentionKernel


def skip_elsewhere(kernel: AttentionKernel) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{kernel.name} runs on compute capability 9.0 alone")
