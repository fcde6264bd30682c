"""The space is every combination; what is left out of it breaks a rule that is told."""

import dataclasses
import math

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.candidates.space import SearchSpace
from tests.support.models import landscape


def test_every_config_is_feasible_or_dropped_with_a_reason() -> None:
    space = landscape.SPACE
    total = sum(math.prod(map(len, kernel.parameters.values())) for kernel in landscape.KERNELS.values())
    dropped = {entry.config for entry in space.dropped}
    assert len(space.feasible) + len(dropped) == total
    assert not dropped & set(space.feasible)
    assert all(entry.reasons for entry in space.dropped)
    assert sum(space.dropped_counts.values()) == len(dropped)
    assert len(space.dropped_counts) == 2


def test_a_kernel_that_cannot_compute_the_shape_says_why() -> None:
    shape = dataclasses.replace(landscape.SHAPE, head_dim=512)
    space = SearchSpace.build(shape, landscape.DEVICE.limits, landscape.KERNELS.values())
    assert space.feasible == ()
    assert space.unsupported["pointers"] == "pointers takes head dimensions up to 256"


def test_configs_that_are_certainly_slow_are_counted_apart_and_kept_by_an_exhaustive_search() -> None:
    kernel, limits = get_kernel("flash_fwd_hopper"), limits_for((9, 0))
    shape = complete_shape(4096, 128)
    usual, whole = (SearchSpace.build(shape, limits, [kernel], exhaustive=exhaustive) for exhaustive in (False, True))
    slow = usual.dropped_counts["too slow, because products spill with more registers than a thread has for them"]
    assert len(whole.feasible) == len(usual.feasible) + slow
    assert not any("too slow" in rule for rule in whole.dropped_counts)
    assert all(not kernel.violations(config, shape, limits) for config in whole.feasible)


def test_named_configs_lead_whether_or_not_they_are_listed() -> None:
    known, new = landscape.SPACE.feasible[5], KernelConfig("pointers", 512, 16, 4, 2)
    space = landscape.SPACE.with_configs([new, known])
    assert space.feasible[:2] == (new, known)
    assert len(space.feasible) == len(landscape.SPACE.feasible) + 1
    assert space.choices("block_m") == (16, 32, 64, 128, 256, 512)


def test_the_real_kernels_have_a_space_and_their_defaults_are_in_it() -> None:
    for cc in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for dim in (64, 80, 128, 256):
            shape, limits = complete_shape(4096, dim, dtype="fp16", causal=True), limits_for(cc)
            space = SearchSpace.build(shape, limits, KERNELS.values())
            for kernel in KERNELS.values():
                if kernel.name not in space.unsupported:
                    assert kernel.default_config(shape, limits) in space.feasible, (kernel.name, cc, dim)
