"""Advice: none names a parameter that the config cannot change, whatever the kernel and the term."""

import re
from dataclasses import replace

import pytest

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cost.term_texts import TERMS, lifts_of

pytestmark = pytest.mark.triton_free

LIMITS = device_named("h200").limits
PLAIN = complete_shape(8192, 64)
NAMES = sorted({name for kernel in KERNELS.values() for name in kernel.parameters})
"""Every parameter of every kernel."""

WORDS = {"stages": "num_stages", "warps": "num_warps", "splits": "splits", "schedule": "schedule"}
"""Ways to name a parameter without writing its name; `resident blocks` and the like name none."""

FEATURES = (
    Features(),
    Features(mask=MaskKind.BLOCK_SPARSE),
    Features(softcap=True),
    Features(alibi=True),
    Features.parse("cached kv=int8"),
)


def shapes_of(kernel: AttentionKernel) -> list[AttentionShape]:
    """Shapes that the kernel computes on Hopper: long, short, of few queries, in all its types."""
    few_queries = (replace(PLAIN, seqlen_q=1), replace(PLAIN, seqlen_q=4, head_dim=128, head_dim_v=128))
    sizes = (PLAIN, replace(PLAIN, seqlen_q=512, seqlen_k=512), replace(PLAIN, batch=1, seqlen_q=512), *few_queries)
    shapes = (
        replace(size, direction=direction, features=features, dtype=dtype)
        for size in sizes
        for direction in Direction
        for features in FEATURES
        for dtype in ("bfloat16", "float32", "float8_e4m3fn")
    )
    return [shape for shape in shapes if kernel.unsupported(shape, LIMITS) is None]


def named_in(text: str) -> set[str]:
    """The parameters that a text speaks of."""
    found = {name for name in NAMES if re.search(rf"\b{name}\b", text)}
    return found | {name for word, name in WORDS.items() if re.search(rf"\b{word}\b", text)}


@pytest.mark.parametrize("name", KERNELS)
def test_no_advice_names_a_parameter_that_the_kernel_lacks_or_cannot_change(name: str) -> None:
    kernel = get_kernel(name)
    shapes = shapes_of(kernel)
    assert shapes, "some shape of the list must be one that this kernel computes"
    for shape in shapes:
        lifts = lifts_of(kernel, kernel.default_config(shape, LIMITS), shape, LIMITS)
        assert set(lifts) == set(TERMS)
        for term, text in lifts.items():
            for parameter in named_in(text):
                assert len(kernel.parameters.get(parameter, ())) > 1, f"{name}, {term}: {text}"


def test_what_a_hopper_kernel_is_told_is_in_its_reach() -> None:
    kernel = get_kernel("flash_fwd_hopper")
    tallest = KernelConfig.of(kernel.name, kernel.default_config(PLAIN, LIMITS).parameters | {"block_m": 256})
    lower = KernelConfig.of(kernel.name, tallest.parameters | {"block_m": 128})
    assert "larger `block_m`" not in lifts_of(kernel, tallest, PLAIN, LIMITS)["l2"]
    assert "larger `block_m`" in lifts_of(kernel, lower, PLAIN, LIMITS)["l2"]
    assert "smaller `block_m`" in lifts_of(kernel, tallest, PLAIN, LIMITS)["tail"]
    assert "resident blocks" not in lifts_of(kernel, lower, PLAIN, LIMITS)["exp"], "16 warps have the SM for themselves"


def test_a_schedule_is_advised_where_the_type_has_it() -> None:
    kernel = get_kernel("flash_fwd")
    config = KernelConfig.of("flash_fwd", kernel.default_config(PLAIN, LIMITS).parameters | {"schedule": 0})
    assert "`schedule`" in lifts_of(kernel, config, PLAIN, LIMITS)["exp"]
    assert "`schedule`" not in lifts_of(kernel, config, replace(PLAIN, dtype="float32"), LIMITS)["exp"]


def test_decoding_is_advised_by_its_splits() -> None:
    shape = replace(complete_shape(8192, 128, batch=1, heads=32, kv_heads=8), seqlen_q=1)
    kernel = get_kernel("flash_decode")
    config = KernelConfig.of("flash_decode", kernel.default_config(shape, LIMITS).parameters | {"splits": 1})
    assert "More `splits`" in lifts_of(kernel, config, shape, LIMITS)["latency"]
    assert "Fewer `splits`" not in lifts_of(kernel, config, shape, LIMITS)["edge"], "one is the fewest"
    hopper = get_kernel("flash_decode_hopper")
    lifts = lifts_of(hopper, hopper.default_config(shape, LIMITS), shape, LIMITS)
    assert "num_stages" not in lifts["latency"], "it has one choice"


def test_the_first_algorithm_has_one_block_a_head_whatever_its_tiles() -> None:
    kernel = get_kernel("flash_v1")
    small = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 1}
    lifts = lifts_of(kernel, KernelConfig.of("flash_v1", small), PLAIN, LIMITS)
    assert "larger `block_n`" in lifts["hbm"]
    for term in ("edge", "tail"):
        assert "one block per head" in lifts[term]
        assert "block_m" not in lifts[term]


def test_a_backward_is_advised_by_the_rows_that_its_blocks_own() -> None:
    shape = replace(PLAIN, direction=Direction.BACKWARD)
    kernel = get_kernel("flash_bwd_split")
    config = KernelConfig.of("flash_bwd_split", kernel.default_config(shape, LIMITS).parameters | {"block_n": 64})
    assert "larger `block_n`" in lifts_of(kernel, config, shape, LIMITS)["l2"]
