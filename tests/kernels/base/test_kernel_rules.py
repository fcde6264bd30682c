"""What the portable kernels say without a compiler: rules, defaults, and the figures that the cost model reads."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from blocktune.kernels.base.flash_kernel import (
    AHEAD,
    AHEAD_FIXED,
    GROUP_BYTES,
    IN_ORDER,
    FlashKernel,
    heads_per_group,
    padded_width,
)
from blocktune.kernels.base.paper_rule import paper_config
from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.registry import KERNELS, get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UnknownKernelError
from blocktune.kernels.values.shape import AttentionShape

pytestmark = pytest.mark.triton_free

PORTABLE = [name for name, kernel in KERNELS.items() if isinstance(kernel, FlashKernel)]
HOPPER = limits_for((9, 0))
CONFIG = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 1, "schedule": IN_ORDER}
HEAD_DIMS = (16, 64, 80, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
# 256 float32 elements a row: the smallest tiles take 72 KiB on 7.5 (compiled with Triton 3.6).
TOO_SMALL_FOR_256_FLOAT32 = {(7, 5)}


def shape(head_dim: int = 64, dtype: str = "bfloat16", **changes: Any) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 8, "seqlen_q": 1000, "seqlen_k": 1000, "head_dim_v": head_dim}
    return AttentionShape(**sizes | {"head_dim": head_dim, "dtype": dtype} | changes)


def problems(kernel: str, parameters: dict[str, int], problem: AttentionShape | None = None) -> tuple[str, ...]:
    return get_kernel(kernel).violations(KernelConfig.of(kernel, parameters), problem or shape(), HOPPER)


@pytest.mark.parametrize("kernel", PORTABLE)
def test_every_choice_of_a_parameter_is_in_range(kernel: str) -> None:
    for name, choices in get_kernel(kernel).parameters.items():
        for choice in choices:
            assert not [text for text in problems(kernel, CONFIG | {name: choice}) if "must be one of" in text]


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize(
    ("name", "value"), [("block_m", 16), ("block_n", 256), ("num_warps", 2), ("num_stages", 5), ("schedule", 3)]
)
def test_parameter_out_of_range(kernel: str, name: str, value: int) -> None:
    (text,) = problems(kernel, CONFIG | {name: value})
    assert text == f"`{name}` of {kernel} must be one of {get_kernel(kernel).parameters[name]}, but got {value}."


@pytest.mark.parametrize("kernel", PORTABLE)
def test_own_parameters_are_exactly_the_kernel_s(kernel: str) -> None:
    (unknown,) = problems(kernel, CONFIG | {"swizzle": 1})
    assert "has the parameters ('block_m', 'block_n', 'num_warps', 'num_stages', 'schedule')" in unknown
    assert "'swizzle': 1" in unknown


@pytest.mark.parametrize("kernel", PORTABLE)
def test_missing_parameter_is_told(kernel: str) -> None:
    config = KernelConfig(kernel, 64, 32, 4, 1)
    assert get_kernel(kernel).rule_violations(config, shape(), HOPPER) == (
        f"`schedule` of {kernel} must be one of (0, 1, 2), but got None.",
    )


@pytest.mark.parametrize(("kernel", "schedule"), list(product(PORTABLE, (AHEAD, AHEAD_FIXED))))
def test_running_ahead_needs_16_bits(kernel: str, schedule: int) -> None:
    own = CONFIG | {"schedule": schedule}
    assert problems(kernel, own) == ()
    assert problems(kernel, CONFIG, shape(dtype="float32")) == ()
    (text,) = problems(kernel, own, shape(dtype="float32"))
    assert text == f"`schedule` 1 and 2 of {kernel} need a 16-bit data type, but got float32."


@pytest.mark.parametrize("kernel", PORTABLE)
def test_shared_memory_that_no_block_can_have(kernel: str) -> None:
    large = CONFIG | {"block_m": 256, "block_n": 128, "num_stages": 4}
    needed = get_kernel(kernel).shared_bytes(KernelConfig.of(kernel, large), shape(128), HOPPER)
    (text,) = problems(kernel, large, shape(128))
    assert "`shared memory <= 232448 B a block` must hold on compute capability 9.0" in text
    assert f"needs {needed} B. Take smaller blocks or fewer stages." in text


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 64), (272, 64), (64, 8), (64, 272)])
def test_head_dimension_out_of_range(kernel: str, head_dim: int, head_dim_v: int) -> None:
    name, value = ("head_dim", head_dim) if head_dim != 64 else ("head_dim_v", head_dim_v)
    reason = get_kernel(kernel).unsupported(shape(head_dim, head_dim_v=head_dim_v), HOPPER)
    assert reason == f"`16 <= {name} <= 256` must hold for {kernel}, but got {name}={value}"


@pytest.mark.parametrize("cc", [cc for cc in known_ccs() if cc < (9, 0)])
def test_descriptors_need_a_copy_engine(cc: tuple[int, int]) -> None:
    assert "needs a tensor copy engine" in (get_kernel("flash_fwd_tma").unsupported(shape(), limits_for(cc)) or "")
    assert get_kernel("flash_fwd") in kernels_for(shape(), limits_for(cc))


def test_descriptors_need_aligned_rows() -> None:
    tma = get_kernel("flash_fwd_tma")
    assert "`head_dim * element size` must be a multiple of 16 B" in (tma.unsupported(shape(100), HOPPER) or "")
    assert "head_dim_v=68" in (tma.unsupported(shape(64, head_dim_v=68), HOPPER) or "")
    assert tma.unsupported(shape(100, "float32"), HOPPER) is None
    assert get_kernel("flash_fwd").unsupported(shape(100), HOPPER) is None


def test_descriptors_need_aligned_tensors() -> None:
    tma, pointers = get_kernel("flash_fwd_tma"), get_kernel("flash_fwd")
    aligned = torch.empty(1, 2, 8, 64, dtype=torch.float16)
    shifted = torch.empty(1, 2, 8, 72, dtype=torch.float16)[..., 1:65]
    odd_rows = torch.empty(1, 2, 8, 65, dtype=torch.float16)[..., :64]
    backwards = torch.empty(1, 2, 64, 8, dtype=torch.float16).transpose(2, 3)
    assert tma.layout_problem(aligned, aligned, aligned) is None
    assert tma.layout_problem(shifted, aligned, aligned) is None  # queries are read through pointers
    for tensor in (shifted, odd_rows):
        assert pointers.layout_problem(tensor, tensor, tensor) is None
        assert "strides of key must be" in (tma.layout_problem(aligned, tensor, aligned) or "")
        assert "strides of value must be" in (tma.layout_problem(aligned, aligned, tensor) or "")
    for kernel in (tma, pointers):
        assert "must be contiguous" in (kernel.layout_problem(backwards, aligned, aligned) or "")


@pytest.mark.parametrize("cc", known_ccs(), ids=str)
@pytest.mark.parametrize(("head_dim", "dtype"), list(product(HEAD_DIMS, DTYPES)))
def test_default_config_is_feasible_everywhere(cc: tuple[int, int], head_dim: int, dtype: str) -> None:
    limits, problem = limits_for(cc), shape(head_dim, dtype)
    kernels = kernels_for(problem, limits)
    if (head_dim, dtype) == (256, "float32") and cc in TOO_SMALL_FOR_256_FLOAT32:
        assert kernels == ()
        assert "smallest blocks" in (get_kernel("flash_fwd").unsupported(problem, limits) or "")
    else:
        assert kernels
    for kernel in kernels:
        config = kernel.default_config(problem, limits)
        assert kernel.violations(config, problem, limits) == ()
        if cc != (9, 0):
            assert config.parameters.get("schedule", IN_ORDER) == IN_ORDER


@pytest.mark.parametrize(("kernel", "head_dim"), list(product(PORTABLE, (64, 128))))
def test_default_config_runs_ahead_on_hopper(kernel: str, head_dim: int) -> None:
    assert get_kernel(kernel).default_config(shape(head_dim), HOPPER).parameters["schedule"] == AHEAD_FIXED


@pytest.mark.parametrize("cc", known_ccs(), ids=str)
@pytest.mark.parametrize(("head_dim", "dtype"), list(product(HEAD_DIMS, DTYPES)))
def test_paper_config_of_the_kernels(cc: tuple[int, int], head_dim: int, dtype: str) -> None:
    limits, problem = limits_for(cc), shape(head_dim, dtype)
    for kernel in kernels_for(problem, limits):
        config = paper_config(kernel, problem, limits)
        keys = math.ceil(limits.shared_per_block_optin_bytes / problem.element_bytes / (4 * head_dim))
        if min(kernel.parameters["block_m"]) > min(keys, head_dim) or min(kernel.parameters["block_n"]) > keys:
            assert config is None  # its smallest tile is larger
        elif config is None:  # the smallest tile of keys that the rule comes to does not fit
            smallest = replace(
                kernel.default_config(problem, limits), block_m=64, block_n=16, num_warps=4, num_stages=1
            )
            assert kernel.shared_bytes(smallest, problem, limits) > limits.shared_per_block_optin_bytes
        else:
            assert config.block_m <= min(keys, head_dim)
            assert config.block_n <= keys
            assert kernel.violations(config, problem, limits) == ()
            assert (config.num_warps, config.num_stages) == (4, min(kernel.parameters["num_stages"]))


@pytest.mark.parametrize(("head_dim", "block_m", "block_n"), [(64, 64, 128), (128, 128, 128), (256, 64, 64)])
def test_paper_config_on_hopper(head_dim: int, block_m: int, block_n: int) -> None:
    # Algorithm 1 says ceil(116224 / 4d) keys and at most d queries; 128 keys are the most that these kernels take.
    for kernel in map(get_kernel, PORTABLE):
        config = paper_config(kernel, shape(head_dim), HOPPER)
        assert config is not None
        assert (config.block_m, config.block_n) == (block_m, block_n)


def test_padded_width() -> None:
    assert [padded_width(dim) for dim in (1, 16, 17, 64, 80, 112, 129, 256)] == [16, 16, 32, 64, 128, 128, 256, 256]


def test_heads_per_group() -> None:
    many = shape(64, batch=4, num_heads=64, num_heads_kv=64)
    head_bytes = 4096 * 128 * 2
    assert heads_per_group(replace(many, seqlen_k=4096)) == GROUP_BYTES // head_bytes == 16
    assert heads_per_group(replace(many, seqlen_k=4 * 4096)) == 8  # 4 fill it, 8 fill it twice
    assert heads_per_group(replace(many, seqlen_k=8 * 4096)) == 4
    assert heads_per_group(replace(many, seqlen_k=1 << 20)) == 1
    assert heads_per_group(replace(many, seqlen_k=1)) == 256  # no more than there are
    assert heads_per_group(replace(many, seqlen_k=4096, dtype="float32")) == 8


@pytest.mark.parametrize("kernel", PORTABLE)
def test_softmax_cost(kernel: str) -> None:
    in_order, ahead, fixed = (
        get_kernel(kernel).softmax_cost(KernelConfig.of(kernel, CONFIG | {"schedule": schedule}))
        for schedule in (IN_ORDER, AHEAD, AHEAD_FIXED)
    )
    assert (in_order.products_overlap, in_order.rescales) == (False, True)
    assert (ahead.products_overlap, ahead.rescales) == (True, True)
    assert (fixed.products_overlap, fixed.rescales) == (True, False)
    assert fixed.instructions_per_score < ahead.instructions_per_score == in_order.instructions_per_score


COMMON = ("block_m", "block_n", "num_warps", "num_stages")
WITH_OWN = [name for name, kernel in KERNELS.items() if len(kernel.parameters) > len(COMMON)]


@pytest.mark.parametrize("kernel", WITH_OWN)
def test_a_config_without_the_kernel_s_own_parameters_is_refused_in_words(kernel: str) -> None:
    (*_, last) = get_kernel(kernel).rule_violations(
        KernelConfig(kernel, 128, 64, 4, 2), shape(seqlen_q=256, seqlen_k=256), HOPPER
    )
    assert "must be one of" in last


@pytest.mark.parametrize(
    ("name", "hint"),
    [("flash_fwd_hoper", "Did you mean flash_fwd_hopper"), ("sage", "The kernels are flash_bwd_hopper, ")],
)
def test_a_misspelt_kernel_gets_the_nearest_names_and_an_unlike_one_all(name: str, hint: str) -> None:
    with pytest.raises(UnknownKernelError, match=f"No such kernel: '{name}'. {hint}"):
        get_kernel(name)
