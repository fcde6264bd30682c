"""What a search begins with, what it takes of compiled configs, and what is told where no config can run."""

import pytest

from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.registry import competing, get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.sources import JsonConfigs
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.candidates.starting_configs import expected_config, find_contenders

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")


def refusal(**sizes: object) -> str:
    kernels = [get_kernel(str(sizes.pop("kernel")))] if "kernel" in sizes else competing()
    with pytest.raises(NoFeasibleConfigError) as caught:
        find_contenders(complete_shape(**sizes), H200, kernels, ())  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("dim", [7, 512])
def test_only_kernels_that_would_compute_the_shape_but_for_its_head_dimension_are_named(dim: int) -> None:
    text = refusal(seq=8192, dim=dim)
    assert text.startswith(f"No config can run {complete_shape(8192, dim).label} on NVIDIA H200: ")
    assert "`16 <= head_dim <= 256` must hold for flash_fwd, " in text
    for stranger in ("flash_bwd", "flash_decode", "fp8", "sparse", "general"):
        assert stranger not in text
    assert len(text) < 400


def test_a_kernel_that_was_named_tells_its_reason() -> None:
    assert "`seqlen_q <= 32` must hold for flash_decode" in refusal(seq=1024, dim=64, kernel="flash_decode")


def test_where_no_kernel_is_near_some_reasons_stand_for_all() -> None:
    text = refusal(seq=64, dim=300, dtype="fp8")
    assert "flash_fwd_fp8" in text
    assert text.count(";") <= 4


def test_every_kernel_tells_its_kind_apart_from_its_sizes() -> None:
    shape = complete_shape(64, 7)
    for kernel in competing():
        problem = kernel.kind_problem(shape)
        assert (problem is None) == (kernel.direction is Direction.FORWARD and "bfloat16" in kernel.dtypes)
        assert kernel.unsupported(shape, H200.limits) is not None


@pytest.mark.parametrize(("dim", "kernel", "block_m"), [(64, "flash_fwd_tma", 64), (128, "flash_fwd_hopper", 128)])
def test_the_paper_s_rule_is_of_the_first_kernel_with_a_tile_as_small(dim: int, kernel: str, block_m: int) -> None:
    """At most head_dim queries: Hopper's own kernels have 128 at least."""
    shape = complete_shape(8192, dim)
    found = find_contenders(shape, H200, kernels_for(shape, H200.limits), ())
    assert found.paper is not None
    assert (found.paper.kernel, found.paper.block_m) == (kernel, block_m)
    assert found.paper in found.first


def test_of_compiled_configs_the_one_is_taken_that_measurements_of_others_speak_for() -> None:
    shape = complete_shape(1, 128, seq_k=8192, batch=4, heads=64, kv_heads=8)
    expected = find_contenders(shape, H200, kernels_for(shape, H200.limits), ()).expected
    times = dict.fromkeys(expected, 50.0)
    assert expected_config(times, shape, H200, ()) in expected
    slow = expected_config(times | {expected[0]: 500.0}, shape, H200, ())
    assert slow in expected[1:]  # the compiled code spills, say
    assert expected_config({}, shape, H200, ()) is None
    assert expected_config(times, shape, device_named("a100"), ()) is None


def shipped(device: DeviceSpec) -> dict[AttentionShape, KernelConfig]:
    """Return the winners that were measured on a device of this kind."""
    return {row.shape: row.config for row in JsonConfigs().configs(device) if row.reuse is not Reuse.SAME_CAPABILITY}


def test_a_winner_that_ships_leads_the_search_of_its_shape_and_that_of_another_device_where_there_is_none() -> None:
    h100, h200 = device_named("h100"), H200
    own, other = shipped(h100), shipped(h200)
    both = next(shape for shape in own if shape in other and own[shape] != other[shape])
    alone = next(shape for shape in other if shape not in own and shape.direction is Direction.FORWARD)
    for device, shape, expected in ((h100, both, own[both]), (h200, both, other[both]), (h100, alone, other[alone])):
        found = find_contenders(shape, device, kernels_for(shape, device.limits), ())
        assert found.untuned == found.first[0] == expected
