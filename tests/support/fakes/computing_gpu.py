"""A fake H200 whose launches are computed by Triton's interpreter, on tensors of the CPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import triton.testing
from triton.runtime.driver import driver
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction

from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.drop_in import decide, tune_call
from blocktune.tuner.drop_in.tune_call import DropInMachine
from blocktune.tuner.launches.launch_bench import LaunchTools
from tests.support.fakes.fake_triton import FakeGpu, FakeHookedClock
from tests.support.libraries.calls import as_on_an_h200


class ComputingGpu(FakeGpu):
    """Computes what is launched."""

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        launch = super().launcher_cls(src, metadata)
        interpreted = InterpretedFunction(src.fn.fn)

        def compute(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            launch(x, y, z, stream, *rest)
            arguments = dict(zip(src.fn.arg_names, rest[5:], strict=True))
            with contextlib.suppress(InterpreterError):  # it calls no jitted functions of others
                interpreted[(x, y, z)](**arguments)

        return compute


@contextlib.contextmanager
def as_on_a_computing_h200() -> Iterator[None]:
    """Let Triton, its benchmarks and our tuner find an H200 on which launches are computed; in a process of its own."""
    with as_on_an_h200():
        gpu = ComputingGpu()
        driver.set_active(gpu)  # type: ignore[arg-type]
        bench = gpu.get_benchmarker()
        triton.testing.do_bench = lambda launch, quantiles=(0.5,), **_: bench(launch, quantiles)
        triton.testing.do_bench_cudagraph = triton.testing.do_bench
        tools = DropInMachine(launches=LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None))
        tune_call.machine, decide.current_device = lambda: tools, lambda: device_named("h200")
        yield
