"""The ceilings of a device, and the kernels that reach for them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.tuner.cost.roofline import ridge_point
from blocktune.tuner.profile import ceilings as ceilings_module
from blocktune.tuner.profile import probes
from blocktune.tuner.profile.ceilings import catalogue_ceilings, measured_ceilings
from blocktune.tuner.profile.machine_code import disassemble, product_loop
from blocktune.tuner.profile.probes import Probe, exp_probe, l2_probe
from tests.support.triton_modes import DEVICE, compiled_here, runs

H200 = device_named("h200")


def test_the_catalogues_ceilings_are_those_of_the_models() -> None:
    found = catalogue_ceilings(H200)
    assert list(found) == ["memory", "l2", "matrix", "exp"]
    assert found["memory"].catalogue == H200.memory_gbs
    assert found["matrix"].catalogue * 1e3 / found["memory"].catalogue == pytest.approx(ridge_point(H200))
    assert H200.clock_mhz is not None
    assert found["exp"].catalogue == pytest.approx(132 * 16 * H200.clock_mhz / 1e6)
    assert all(ceiling.measured is ceiling.share is None for ceiling in found.values())


def test_a_device_without_rates_has_no_ceilings() -> None:
    with pytest.raises(UsageError, match="NVIDIA H200: its memory_gbs is unknown"):
        catalogue_ceilings(replace(H200, memory_gbs=None))


class FakeClock:
    """Runs launches and says what they took."""

    def __init__(self, times_us: Sequence[float]) -> None:
        self.times_us, self.heated = times_us, 0.0

    def heat(self, launch: Callable[[], Any], seconds: float) -> None:
        launch()
        self.heated += seconds

    def rounds(self, launches: Sequence[Callable[[], Any]], count: int) -> tuple[tuple[float, ...], ...]:
        for launch in launches:
            launch()
        return tuple((time_us,) for time_us in self.times_us)


def test_a_rate_is_that_of_the_fastest_round_after_heat() -> None:
    clock: Any = FakeClock((250.0, 200.0, 300.0))
    assert Probe(1e9, lambda: None).best_rate(clock) == pytest.approx(5000.0)  # 1e9 in 200 us: 5e12 a second
    assert clock.heated > 0


def test_measured_ceilings_stand_next_to_the_catalogues(monkeypatch: pytest.MonkeyPatch) -> None:
    amounts = {"memory": 1e9, "l2": 3e9, "matrix": 2e11, "exp": 8e8}
    made: dict[str, Callable[[], Probe]] = {
        name: lambda amount=amount: Probe(amount, lambda: None) for name, amount in amounts.items()
    }
    monkeypatch.setattr(probes, "probes_here", lambda: made)
    monkeypatch.setattr(ceilings_module, "current_device", lambda: H200)
    monkeypatch.setattr("blocktune.tuner.measure.clock.CudaClock", lambda: FakeClock((250.0,)))
    said: list[str] = []
    found = measured_ceilings(H200, said.append)
    measured = {name: ceiling.measured for name, ceiling in found.items()}
    assert measured == pytest.approx({"memory": 4000.0, "l2": 12000.0, "matrix": 800.0, "exp": 3.2})
    assert found["memory"].share == pytest.approx(4000 / 4800)
    assert said == [f"measuring: {ceiling.title}" for ceiling in found.values()]


def test_only_the_current_gpu_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_module, "current_device", lambda: device_named("a10g"))
    with pytest.raises(NoDeviceError, match="the current GPU, NVIDIA A10G, but got NVIDIA H200"):
        measured_ceilings(H200, print)


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise NoDeviceError("A GPU is required here.")

    monkeypatch.setattr(ceilings_module, "current_device", absent)
    with pytest.raises(NoDeviceError, match=r"^A GPU is required here\..*Without --measure"):
        measured_ceilings(H200, print)


@runs
@pytest.mark.interpreted
def test_the_reading_kernel_adds_every_block_that_it_counts() -> None:
    steps = 3
    probe = l2_probe(probes.L2_SHARE * 4 * probes.READ_BLOCK * 2, 1, DEVICE, steps)
    assert probe.amount == 4 * probes.READERS_PER_SM * steps * probes.READ_BLOCK
    sums = torch.zeros(probes.READERS_PER_SM, probes.READ_BLOCK, device=DEVICE)
    words = torch.arange(1, 3, device=DEVICE, dtype=torch.float32)[:, None].repeat(1, probes.READ_BLOCK)
    probes.read_kernel[(probes.READERS_PER_SM,)](words, sums, 2, STEPS=steps, BLOCK=probes.READ_BLOCK, num_warps=8)
    places = [[(program * 97 + step) % 2 for step in range(steps)] for program in range(probes.READERS_PER_SM)]
    expected = [float(sum(place + 1 for place in own)) for own in places]
    assert sums[:, 0].tolist() == expected
    assert torch.equal(sums, sums[:, :1].expand_as(sums))
    probe.run()


@runs
@pytest.mark.interpreted
def test_the_exponential_kernel_computes_every_one_that_it_counts() -> None:
    values = torch.rand(2, probes.EXP_BLOCK, device=DEVICE)
    expected = values.clone()
    for _ in range(3):
        expected = torch.exp2(-expected)
    probes.exp_kernel[(2,)](values, STEPS=3, BLOCK=probes.EXP_BLOCK, num_warps=probes.EXP_WARPS)
    torch.testing.assert_close(values, expected)
    probe = exp_probe(1, DEVICE, 2)
    assert probe.amount == probes.EXP_BLOCKS_PER_SM * 2 * probes.EXP_BLOCK
    probe.run()


@compiled_here
def test_the_compiled_loops_do_what_they_measure() -> None:
    """An exponential in nearly every second instruction; reads of 16 bytes that pass L1."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    def loop_of(function: Any, tensors: tuple[str, ...], numbers: tuple[str, ...], **constants: int) -> list[str]:
        names = (*tensors, *numbers, *constants)
        kinds = dict.fromkeys(tensors, "*fp32") | dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
        values = {(names.index(name),): value for name, value in constants.items()}
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in tensors}
        compiled: Any = compile_kernel(
            ASTSource(function, kinds, values, aligned),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 8, "enable_fp_fusion": True},
        )
        return [one.name for one in product_loop(disassemble(compiled.asm["cubin"], knobs.nvidia.nvdisasm.path))]

    exponentials = loop_of(probes.exp_kernel, ("Values",), (), STEPS=probes.EXP_STEPS, BLOCK=probes.EXP_BLOCK)
    assert exponentials.count("MUFU.EX2") > 0.45 * len(exponentials)
    reads = loop_of(
        probes.read_kernel, ("Words", "Sums"), ("num_blocks",), STEPS=probes.READ_STEPS, BLOCK=probes.READ_BLOCK
    )
    assert {name for name in reads if name.startswith("LD")} - {"LDC", "LDC.64"} == {"LDG.E.128.STRONG.GPU"}


@pytest.mark.gpu
def test_this_gpu_reaches_ceilings_that_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    from blocktune.kernels.hardware.device import current_device

    found = measured_ceilings(current_device(), print)
    with capsys.disabled():
        for ceiling in found.values():
            print(f"\n{ceiling.title}: {ceiling.measured:,.4g} of {ceiling.catalogue:,.4g} {ceiling.unit}", end="")
    shares = {name: ceiling.share or 0.0 for name, ceiling in found.items()}
    assert 0.6 < shares["memory"] < 1.05
    assert 0.5 < shares["matrix"] < 1.1
    assert 0.6 < shares["exp"] < 1.2
    assert found["l2"].known > found["memory"].known
