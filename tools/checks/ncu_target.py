"""Launches the configs named on the command line once each; what Nsight Compute looks at."""

import json
import sys

import torch

from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape

shape = complete_shape(1024, 64, batch=2, heads=8)
q, k, v = (torch.randn(2, 8, 1024, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
for text in sys.argv[1:]:
    config = KernelConfig.from_json(json.loads(text))
    get_kernel(config.kernel).bind(config, shape)(q, k, v, torch.empty_like(q), None, 0.125)
torch.cuda.synchronize()
