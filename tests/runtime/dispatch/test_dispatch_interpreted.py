"""The dispatcher with the real kernels on the CPU: Triton's interpreter runs them in a process of its own."""

import os
import subprocess
import textwrap

import pytest

from blocktune.kernels.base.flash_kernel import FlashKernel
from blocktune.kernels.registry import KERNELS
from tools import python

INTERPRETED = [name for name, kernel in KERNELS.items() if isinstance(kernel, FlashKernel)]
"""Triton's interpreter has no instructions of one GPU."""

BEGIN = "from tests.support.quick_interpreter import do_less; do_less()\n"

SCRIPT = """
    import sys, torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    from blocktune.runtime.dispatch import obstacles
    from blocktune.runtime.dispatch import resolver
    from blocktune.runtime.dispatch.sdpa_arguments import plain_call
    from blocktune.runtime.dispatch.sdpa_arguments import SdpaArguments
    from blocktune.kernels.values.config import Origin
    from blocktune.kernels.values.shape import Direction
    from blocktune.runtime.store_reader.tuned_config import TunedConfig
    from blocktune.kernels.hardware.device import device_named
    from blocktune.runtime.dispatch.dispatcher import Dispatcher
    from blocktune.kernels.registry import get_kernel

    device = device_named("h200")
    kernel = get_kernel(sys.argv[1])
    obstacles.KERNEL_DEVICE = "cpu"
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
    calls = [plain_call(SdpaArguments(*arguments, is_causal=causal)) for arguments, causal in cases]
    shapes = [call.shape(*arguments, Direction.FORWARD) for call, (arguments, _) in zip(calls, cases)]
    dispatcher = Dispatcher(EachShapesDefault())
    for arguments, causal in cases:
        options = {"is_causal": causal, "enable_gqa": True, "scale": 0.2}
        got = dispatcher(*arguments, **options)
        expected = sdpa(*(tensor.float() for tensor in arguments), **options)
        torch.testing.assert_close(got.float(), expected, atol=4e-3, rtol=4e-3)
        print(dispatcher.explain(*arguments, **options).rung)
"""


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernels_compute_what_pytorch_computes(name: str) -> None:
    command = [*python(BEGIN + textwrap.dedent(SCRIPT)), name]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["exact"] * 3


FEATURES = """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    from blocktune import BlockMask, attention, block_sparse_attention, flash_attn_func, flash_attn_varlen_func
    from blocktune.runtime.dispatch import dispatcher, obstacles, resolver
    from blocktune.kernels.hardware.device import device_named
    from blocktune.runtime.selection import pytorch_rival
    from blocktune.kernels.values.dropout import keep_mask

    pytorch_rival.reason_for_pytorch = lambda shape, device_key: None  # nothing was measured on such a device
    obstacles.KERNEL_DEVICE = dispatcher.KERNEL_DEVICE = "cpu"
    resolver.current_device = lambda index: device_named("rtx2070")


    def compare(attend, expected):
        torch.manual_seed(0)
        leaves = [torch.randn(1, h, l, 16).requires_grad_() for h, l in ((4, 20), (2, 24), (2, 24))]
        torch.manual_seed(1)
        out = attend(*leaves)
        torch.manual_seed(1)
        right = expected(*leaves)
        grad = torch.randn_like(right)
        got, wanted = ([one, *torch.autograd.grad(one, leaves, grad)] for one in (out, right))
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)


    def dropped(q, k, v):
        seed, offset = torch.randint(2**62, (2,)).tolist()
        kept = keep_mask(1, 4, 20, 24, 0.3, seed, offset)
        k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
        return ((q @ k.mT / 4).softmax(-1) * kept / 0.7) @ v


    def packed(q, k, v):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        bounds = [torch.tensor([0, 7, last], dtype=torch.int32) for last in (20, 24)]
        return flash_attn_varlen_func(q, k, v, *bounds, 13, 17).transpose(0, 1)[None]


    def apart(q, k, v):
        seen = torch.arange(20)[:, None].lt(7) == torch.arange(24)[None].lt(7)
        return sdpa(q, k, v, seen, enable_gqa=True)


    def windowed(q, k, v):
        turned = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        return flash_attn_func(*turned, causal=True, window_size=(5, -1)).transpose(1, 2)


    def near(q, k, v):
        distance = torch.arange(24)[None] - torch.arange(20)[:, None] - 4
        return sdpa(q, k, v, (distance <= 0) & (distance >= -5), enable_gqa=True)


    attention.explain(*(torch.ones(1, 4, 20, 16) for _ in range(3)))  # waits until the configs are read
    for mask in (torch.arange(24)[None, None, None] < 17, torch.randn(4, 20, 1)):
        compare(lambda *t: attention(*t, mask, enable_gqa=True), lambda *t: sdpa(*t, mask, enable_gqa=True))
    compare(lambda *t: attention(*t, dropout_p=0.3, enable_gqa=True), dropped)
    compare(packed, apart)
    compare(windowed, near)
    blocks = BlockMask(16, 16, torch.tensor([[[[True, False], [True, True]]]]))
    compare(lambda *t: block_sparse_attention(*t, blocks), lambda *t: sdpa(
        *t, blocks.to_dense(20, 24), enable_gqa=True))
    plans = attention._resolver.plans.values()
    print(*sorted({str(plan.explanation.config.kernel if hasattr(plan, "launch") else plan) for plan in plans}))
    print(len(plans))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_calls_with_features_train_by_the_real_kernels() -> None:
    command = python(BEGIN + textwrap.dedent(FEATURES))
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    served, count = result.stdout.splitlines()
    assert {"flash_fwd_general", "flash_fwd_sparse", "flash_bwd_sparse"} <= set(served.split())
    assert all(name in KERNELS for name in served.split())
    assert int(count) == 13  # that of the explained call, and a forward and a backward of every other
