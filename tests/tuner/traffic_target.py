"""Launches configs once each, for Nsight Compute to count their bytes: one JSON object {shape, config} an argument."""

import json
import sys

import torch

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.shape import AttentionShape


def main() -> None:
    for argument in sys.argv[1:]:
        task = json.loads(argument)
        shape, config = AttentionShape.from_json(task["shape"]), KernelConfig.from_json(task["config"])
        dtype = getattr(torch, shape.dtype)
        q = torch.randn(shape.batch, shape.num_heads, shape.seqlen_q, shape.head_dim, device="cuda", dtype=dtype)
        k = torch.randn(shape.batch, shape.num_heads_kv, shape.seqlen_k, shape.head_dim, device="cuda", dtype=dtype)
        v = torch.randn(shape.batch, shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v, device="cuda", dtype=dtype)
        out = torch.empty(*q.shape[:3], shape.head_dim_v, device="cuda", dtype=dtype)
        get_kernel(config.kernel).bind(config, shape)(q, k, v, out, None, shape.head_dim**-0.5)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
