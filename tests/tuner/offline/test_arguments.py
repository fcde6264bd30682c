"""Arguments in words: every form, as Triton specialises it at a launch."""

from typing import Any

import pytest
import torch
from triton import language as tl

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.compile.compiler import compile_here
from blocktune.tuner.dry_run.recorder import dry_launches
from blocktune.tuner.offline.arguments import CONSTANT, Argument, constant_of, parsed_argument, parts_of, value_of
from blocktune.tuner.offline.code import spec_offline
from blocktune.tuner.offline.signature import positional_signature
from tests.support.libraries import launched_kernels
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here

H200 = device_named("h200")
LIBRARY = "tests.support.libraries.launched_kernels"


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("*bf16", Argument("*bf16", divides=True)),
        ("*bf16:1", Argument("*bf16")),
        ("i32:16", Argument("i32", divides=True)),
        ("i32=64", Argument("i32", 64, divides=True)),
        ("i64=7", Argument("i64", 7)),
        ("i32=1", Argument(CONSTANT, 1)),
        ("u8=255", Argument("u8", 255)),
        ("i64=-9223372036854775808", Argument("i64", -(1 << 63), divides=True)),
        ("u1=1", Argument("u1", True)),
        ("fp32=1", Argument("fp32", 1.0)),
        ("fp64=64", Argument("fp64", 64.0)),
        ("bf16=-0.5", Argument("bf16", -0.5)),
        ("1", Argument(CONSTANT, 1)),
        ("4294967296", Argument("i64", 1 << 32, divides=True)),
        ("-1", Argument("i32", -1)),
        ("2.5", Argument("fp32", 2.5)),
        ("true", Argument("u1", True)),
        ("None", Argument(CONSTANT, None)),
        ("tl.bfloat16", Argument(CONSTANT, tl.bfloat16)),
        ("torch.float8_e4m3fn", Argument(CONSTANT, tl.float8e4nv)),
        (f"{LIBRARY}:doubled", Argument(CONSTANT, launched_kernels.doubled)),
        ("tensordesc<bf16[64, 64]>", Argument("tensordesc<bf16[64, 64]>")),
        (
            "(*fp32, (1, i32:16))",
            (Argument("*fp32", divides=True), (Argument(CONSTANT, 1), Argument("i32", divides=True))),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # of an argument each process has another text
)
def test_a_word_is_an_argument(text: str, argument: Any) -> None:
    found = parsed_argument(text)
    assert found == argument
    if isinstance(found, Argument):
        assert (found.value, type(found.value)) == (argument.value, type(argument.value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("i32=2.5", "A number of i32 is an integer from -2147483648 to 2147483647, but 'i32=2.5'"),
        ("i32=1.0", "of i32 is an integer"),
        ("i32=2147483648", "of i32 is an integer"),
        ("u8=256", "of u8 is an integer from 0 to 255"),
        ("u32=-1", "of u32 is an integer from 0 to 4294967295"),
        ("u1=2", "of u1 is an integer from 0 to 1"),
        ("i32=none", "has a value after `=`"),
        ("*fp32=1", "is no number"),
        ("fp32:16=1", "is no number"),
        ("i32:16=16", "is no number"),
        ("tensordesc<bf16[64,64]>=1", "is no number"),
    ],
)
def test_a_value_that_its_type_does_not_have_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed_argument(text)
    assert message in str(refused.value)


def test_commas_of_blocks_and_tuples_part_nothing() -> None:
    assert parts_of("*bf16, tensordesc<bf16[1, 2]>, (*fp32, (1, 2)), none") == [
        "*bf16",
        "tensordesc<bf16[1, 2]>",
        "(*fp32, (1, 2))",
        "none",
    ]


def test_functions_of_authors_get_a_tensor_of_the_type() -> None:
    assert value_of(parsed_argument("*fp8e4nv")).dtype is torch.float8_e4m3fn


def test_a_signature_of_every_form_compiles_to_the_code_of_the_launch() -> None:
    launch = dry_launches(launched_kernels.strided, H200)[0]
    (recorded,) = launch.configs.values()
    assert recorded.specialization is not None
    types = positional_signature(launched_kernels.strided_kernel, "*bf16,*bf16,none,1000,i32=1,2.0,(*bf16,1)")
    constants = {"DTYPE": constant_of("tl.float32"), "OF": constant_of(f"{LIBRARY}:doubled"), "BLOCK": 256}
    spec = spec_offline(launched_kernels.strided_kernel, types, constants)
    ours, theirs = (compile_here(each, (9, 0)).resources for each in (spec, recorded.specialization.spec))
    assert ours == theirs is not None


def test_heuristics_are_computed_or_say_what_they_miss() -> None:
    kernel = launched_kernels.even_kernel
    for n, even in ((1024, True), (1000, False)):
        spec = spec_offline(kernel, positional_signature(kernel, f"*fp32,*fp32,i32={n}"), {"BLOCK": 128})
        assert spec.constexprs[4,] is even
    types = positional_signature(kernel, "*fp32,*fp32,i32:16")
    assert spec_offline(kernel, types, {"BLOCK": 128, "EVEN": True}).constexprs[4,] is True
    with pytest.raises(UsageError, match=r"computes EVEN from the call, but fails with KeyError: 'n'. Give"):
        spec_offline(kernel, types, {"BLOCK": 128})
