"""What a launch moves and computes: as its author says, else as its code does; and what a search makes of it."""

from typing import Any

import pytest
import torch
import triton
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.offline.counts import CodeCounts, counts_in
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, row_kernel, scale_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200, compiler, gpu, path

__all__ = ["compiler", "gpu", "path"]

pytestmark = compiled_here


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def moved(grid: Any, metadata: Any, named: dict[str, Any]) -> dict[str, Any]:
    return {"name": f"{metadata.name} of {grid[0]}", "bytes": 8 * named["n"], "flops32": named["n"]}


@triton.jit(launch_metadata=moved)
def told_kernel(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, offsets < n) * 2, offsets < n)


def rates(kernel: Any) -> str:
    (choice,) = kernel.kernel.choices.values()
    return choice.rates


def test_the_author_says_what_a_launch_moves(gpu: FakeGpu) -> None:
    x = torch.ones(1 << 20)
    kernel = autotune(CONFIGS, ["n"], costs=lambda named: {"bytes": 8 * named["n"]})(scale_kernel.fn)
    kernel[grid](x, 1 << 20, 2.0)
    assert rates(kernel).startswith("76 GB/s, 0.0 TFLOP/s by its `costs`, ")  # 8 MiB in 110 µs
    kernel = autotune(CONFIGS, ["n"])(told_kernel)
    kernel[grid](x, 1 << 20)
    assert rates(kernel).startswith("76 GB/s, 0.0 TFLOP/s by its `launch_metadata`, ")
    assert rates(kernel) in str(next(iter(kernel.kernel.choices.values())))


def test_metadata_that_fails_without_a_profiler_costs_no_call(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_kernel, "launch_metadata", lambda grid, metadata, named: named["no such"])
    kernel = autotune(CONFIGS, ["n"])(told_kernel)
    kernel[grid](torch.ones(1000), 1000)
    assert rates(kernel) == ""


def test_code_without_a_loop_is_counted(gpu: FakeGpu) -> None:
    kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
    kernel[grid](torch.ones(1 << 20), 1 << 20, 2.0)
    assert rates(kernel).startswith("76 GB/s, 0.0 TFLOP/s by its compiled code, ")


def set_blocks(named: dict[str, Any]) -> None:
    named["rows"].block_shape = [1, named["BLOCK"]]


def test_code_that_is_counted_has_the_winners_blocks(gpu: FakeGpu) -> None:
    """The descriptors of a call keep the blocks of the config that was launched last."""
    gpu.time_us = lambda launch: 100.0  # so that the first config wins after all have taken turns to the end
    configs = [triton.Config({"BLOCK": block}, num_warps=2, pre_hook=set_blocks) for block in (64, 128, 256, 512)]
    kernel = autotune(configs, ["n"])(row_kernel)
    rows = TensorDescriptor(torch.zeros(8, 1024), [8, 1024], [1024, 1], [1, 1])
    kernel[(8,)](rows, torch.zeros(8), 1024)
    assert gpu.timed[-1].arguments["BLOCK"] != 64
    assert kernel.best_config.kwargs["BLOCK"] == 64
    assert rows.block_shape == [1, 64]


def test_loops_bulk_copies_and_products_in_code() -> None:
    loop = "$L__BB0_1:\n ld.global.v4.b32 {%r1}, [%rd1];\n @%p1 bra $L__BB0_1;\n"
    assert counts_in(loop, 4) is None
    assert counts_in("cp.async.bulk.tensor.2d.shared::cluster.global [a];", 4) is None
    ahead = "@%p1 bra $L__BB0_2;\nst.global.L1::evict_last.v2.b64 [%rd1], {a};\n$L__BB0_2:\n ret;"
    assert counts_in(ahead, 2) == CodeCounts(bytes=16 * 64, flops=0)
    products = (
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {a};\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {a};\n"
    )
    assert counts_in(products, 8) == CodeCounts(bytes=16 * 256, flops=2 * (64 * 128 * 16 * 2 + 16 * 8 * 16 * 8))


def test_a_search_ends_at_the_limit_of_the_device(gpu: FakeGpu) -> None:
    assert H200.memory_gbs is not None
    enough = 238.0 * H200.memory_gbs * 1e3  # bytes that take the device as long as the better one of the list
    for size, searched in ((enough, False), (1.0, True)):
        kernel = autotune(CONFIGS[-1:] + CONFIGS[:1], ["n"], expand=8, costs=lambda named, size=size: {"bytes": size})
        tuned = kernel(scale_kernel.fn)
        before = len(gpu.timed)
        tuned[grid](torch.ones(1000), 1000 + searched, 2.0)
        blocks = {(launch.arguments["BLOCK"], launch.num_warps) for launch in gpu.timed[before:]}
        assert (len(blocks) > 2) is searched


def test_what_tells_nothing_is_searched_all_the_same(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    def set_blocks(named: dict[str, Any]) -> None:
        named["rows"].block_shape = [1, named["BLOCK"]]

    configs = [triton.Config({"BLOCK": block}, pre_hook=set_blocks) for block in (64, 128)]
    rows = TensorDescriptor(torch.zeros(8, 1024), [8, 1024], [1024, 1], [1, 1])
    kernel = autotune(configs, ["n"], expand=4)(row_kernel)
    with caplog.at_level("INFO", "blocktune"):
        kernel[(8,)](rows, torch.zeros(8), 1024)
    assert "what a launch moves and computes is not known" in caplog.text
    assert kernel.best_config.kwargs["BLOCK"] == 256
    assert "the search goes by resources and times alone" in rates(kernel)


@pytest.mark.parametrize("returned", [{"bytes": "many"}, {"byte": 8}, 8])
def test_costs_that_are_no_numbers_by_name_are_refused(gpu: FakeGpu, returned: Any) -> None:
    kernel = autotune(CONFIGS, ["n"], costs=lambda named: returned)(scale_kernel.fn)
    with pytest.raises(
        UsageError, match=r"The `costs` of .* must return the numbers `bytes` and `flops` by name, but returned"
    ):
        kernel[grid](torch.ones(1000), 1000, 2.0)
