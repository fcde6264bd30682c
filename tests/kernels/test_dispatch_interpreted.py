"""The dispatcher with the real kernels on the CPU: Triton's interpreter runs them in a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

from blocktune.kernels.flash_kernel import FlashKernel
from blocktune.kernels.registry import KERNELS

INTERPRETED = [name for name, kernel in KERNELS.items() if isinstance(kernel, FlashKernel)]
"""Triton's interpreter has no instructions of one GPU."""

SCRIPT = """
    import sys, torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    from blocktune.kernels import plan, resolver
    from blocktune.kernels.config import Origin, TunedConfig
    from blocktune.kernels.device import device_named
    from blocktune.kernels.dispatch import Dispatcher
    from blocktune.kernels.registry import get_kernel

    device = device_named("h200")
    kernel = get_kernel(sys.argv[1])
    plan.KERNEL_DEVICE = "cpu"
    resolver.current_device = lambda index: device


    class EachShapesDefault:
        def configs(self, device):
            return [
                TunedConfig(shape=shape, config=kernel.default_config(shape, device.limits), origin=Origin.MEASURED)
                for shape in shapes
            ]


    def tensors(heads, heads_kv, length_q, length_k, dim, dim_v, bshd):
        sizes = [(heads, length_q, dim), (heads_kv, length_k, dim), (heads_kv, length_k, dim_v)]
        made = [torch.randn(2, l, h, d) if bshd else torch.randn(2, h, l, d) for h, l, d in sizes]
        return [(tensor.transpose(1, 2) if bshd else tensor).half() for tensor in made]


    cases = [
        (tensors(2, 1, 70, 33, 64, 64, True), True),
        (tensors(2, 1, 5, 130, 80, 32, True), True),
        (tensors(1, 1, 130, 70, 32, 64, False), False),
    ]
    shapes = [plan.shape_of(*arguments, causal) for arguments, causal in cases]
    dispatcher = Dispatcher(EachShapesDefault())
    for arguments, causal in cases:
        options = {"is_causal": causal, "enable_gqa": True, "scale": 0.2}
        got = dispatcher(*arguments, **options)
        expected = sdpa(*(tensor.float() for tensor in arguments), **options)
        torch.testing.assert_close(got.float(), expected, atol=4e-3, rtol=4e-3)
        print(dispatcher.explain(*arguments, **options).rung)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernels_compute_what_pytorch_computes(name: str) -> None:
    command = [sys.executable, "-P", "-c", textwrap.dedent(SCRIPT), name]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["exact"] * 3
