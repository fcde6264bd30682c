"""Kernels compiled for a GPU that is not here, from a signature or from a stored key."""

from typing import Any

import pytest
import torch
import triton
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call_key import CallKey, Parameter
from blocktune.runtime.autotuned.config import LaunchProblem
from blocktune.tuner.offline.code import compiled_offline
from blocktune.tuner.offline.signature import call_of_problem, positional_signature
from tests.support.libraries.autotuned_kernels import row_kernel, scale_kernel
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here

LIMITS = device_named("h200").limits


@triton.jit
def widened_kernel(x, out, mask, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(mask + offsets, offsets < n).to(tl.int1)
    tl.store(out + offsets, tl.load(x + offsets, offsets < n).to(tl.float32), (offsets < n) & kept)


def stored_key(kernel: Any, args: tuple[Any, ...], *, sets_blocks: bool = False) -> LaunchProblem:
    """Return the key of a call in the store."""
    params = [Parameter(param.name, param.is_constexpr, param.do_not_specialize) for param in kernel.params]
    return CallKey(params, ["n"], {}, sets_blocks=sets_blocks).problem(args, {})


def rows() -> TensorDescriptor:
    return TensorDescriptor(torch.zeros(8, 1024), [8, 1024], [1024, 1], [1, 256])


def test_a_stored_key_tells_types_of_8_bits_and_pointers_that_do_not_divide() -> None:
    x = torch.zeros(1001, dtype=torch.float8_e4m3fn)[1:]
    args = (x, torch.zeros(1000), torch.ones(1000, dtype=torch.bool), 1000)
    types, constants = call_of_problem(widened_kernel, stored_key(widened_kernel, args))
    assert types == {"x": "*fp8e4nv:1", "out": "*fp32", "mask": "*u1", "n": "i32=1000"}
    assert compiled_offline(widened_kernel, types, constants | {"BLOCK": 256}, LIMITS).resources.registers


def test_a_stored_key_tells_the_block_of_a_descriptor_unless_configs_set_it() -> None:
    args = (rows(), torch.zeros(8), 1024)
    types, constants = call_of_problem(row_kernel, stored_key(row_kernel, args))
    assert types == {"rows": "tensordesc<fp32[1,256]>", "out": "*fp32", "n": "i32=1024"}
    assert compiled_offline(row_kernel, types, constants | {"BLOCK": 256}, LIMITS).resources.registers
    with pytest.raises(UsageError, match=r"unless hooks of the configs set them, as here. Give the types"):
        call_of_problem(row_kernel, stored_key(row_kernel, args, sets_blocks=True))


def test_a_signature_may_have_descriptors() -> None:
    assert positional_signature(row_kernel, "tensordesc<bf16[64, 64]>, *fp32:1, i32:16") == {
        "rows": "tensordesc<bf16[64, 64]>",
        "out": "*fp32:1",
        "n": "i32:16",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has a type for each of x, n, factor, but '' has 0"),
        ("*fp32,i32", "but '.*' has 2. Write for example"),
        ("*float,i32,fp32", r"but '\*float' is none. Write `\*bf16`"),
        ("*fp32,i32:8,fp32", "but 'i32:8' is none"),
        ("*fp32,i32:1,fp32", "but 'i32:1' is none"),
        ("*fp32,i32=x,fp32", "A number has a value after `=`, but 'i32=x' has 'x'"),
        ("*fp32,*fp32=1,fp32", "but '\\*fp32=1' is no number"),
        ("*fp32,tl.bfloat,fp32", "tl.bfloat is no data type of Triton's"),
        ("*fp32,tests.support:nothing,fp32", "has no attribute 'nothing'"),
        ("tensordesc<fp32>,i32,fp32", "but 'tensordesc<fp32>' is none"),
    ],
)
def test_a_wrong_signature_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        positional_signature(scale_kernel, text)
