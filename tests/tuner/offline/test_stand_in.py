"""A GPU that stands in: programs find it, and their tensors there."""

import warnings
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.offline.stand_in import stand_in
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here

A100, H200 = device_named("a100"), device_named("h200")


@pytest.fixture
def on_a_gpu() -> Any:
    with stand_in(H200) as driver:
        yield driver


def test_a_program_finds_the_device(on_a_gpu: Any) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties("cuda").multi_processor_count == 132
    assert on_a_gpu.get_current_target().arch == 90
    with stand_in(A100) as other:
        assert other.get_current_target().arch == 80
        assert torch.cuda.get_device_name() == A100.name
    assert torch.cuda.get_device_name() == H200.name


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, device="cuda"),
        lambda: torch.ones(4, device="cuda:0"),
        lambda: torch.ones(4, device=torch.device("cuda")),
        lambda: torch.ones(4, device=0),
        lambda: torch.ones(4, device="cpu").cuda(),
        lambda: torch.ones(4, device="cpu").to("cuda", torch.bfloat16),
        lambda: torch.ones(4, device="cpu").to(0),
        lambda: torch.ones(4, device="cpu", pin_memory=True),
        lambda: torch.nn.Linear(4, 4).cuda()(torch.ones(4, device="cuda")).detach(),
        lambda: torch.rand(4, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)),
        lambda: torch.ones(4, device="meta"),
    ],
)
def test_tensors_say_that_they_are_on_it(on_a_gpu: Any, make: Any) -> None:
    made: Tensor = make()
    assert made.is_cuda
    assert (made.device, made.get_device(), made.shape) == (torch.device("cuda", 0), 0, (4,))
    assert torch.empty_like(made).is_cuda


def test_memory_that_is_not_filled_is_zero(on_a_gpu: Any) -> None:
    x = torch.ones(64, device="cuda")
    made = (
        torch.empty(64, device="cuda"),
        torch.empty_like(x),
        x.new_empty(64),
        torch.empty_strided((64,), (1,), device="cuda"),
    )
    assert all(not each.any() for each in made)


def test_from_the_first_tensor_on_meta_all_are_there(on_a_gpu: Any) -> None:
    first = torch.ones(1 << 50, device="meta")
    assert (torch.ones(1 << 50, device="cuda") + first).shape == first.shape


def test_casts_for_the_gpu_are_those_of_its_types(on_a_gpu: Any) -> None:
    x = torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda"):
        assert (x @ x).dtype == torch.float16
        assert torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.get_autocast_dtype("cuda") == torch.bfloat16
    assert not torch.is_autocast_enabled()


def test_gradients_and_operators_are_on_it(on_a_gpu: Any) -> None:
    places = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            places.append(gradient.device)
            return gradient

    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @torch.library.custom_op("blocktune_tests::stood_in", mutates_args=(), device_types="cuda")
        def operator(x: Tensor) -> Tensor:
            places.append(x.device)
            return torch.empty_like(x)

    Noting.apply(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
    operator(torch.ones(4, device="cuda"))
    assert places == [torch.device("cuda", 0)] * 2


def test_what_a_program_does_with_the_gpu_besides_does_nothing(on_a_gpu: Any) -> None:
    torch.manual_seed(1)
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(torch.cuda.CUDAGraph()):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        torch.cuda.synchronize()
    assert event.elapsed_time(torch.cuda.Event()) > 0
    assert triton.testing.do_bench(lambda: None) == 1.0
    assert torch.compile(lambda x: x + 1)(torch.ones(1, device="cuda")).item() == 2


def test_all_is_undone() -> None:
    names = ("is_available", "Event", "device")
    before = [getattr(torch.cuda, name) for name in names] + [torch.compile, torch.Generator, torch.version.cuda]
    with stand_in(H200):
        torch.ones(1, device="cuda")
    assert [getattr(torch.cuda, name) for name in names] + [
        torch.compile,
        torch.Generator,
        torch.version.cuda,
    ] == before
    assert not torch.ones(1, device="cpu").is_cuda
