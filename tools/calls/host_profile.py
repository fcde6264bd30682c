"""What calls cost on the host, on a machine without a GPU: microseconds of each entry point, and where they go.

python -m tools.calls.host_profile [--functions NUMBER] [ENTRY ...]

Kernels are compiled for an H200 and launched by Triton's own launcher, whose libcuda (fake_cuda.c) does nothing: all of
the host's part runs, but for PyTorch's own calls of CUDA. Tensors are the CPU's, whose memory costs less than a GPU's.
The time of a call is the least of many short rounds, since other programs use the machine as well.
"""

import argparse
import cProfile
import ctypes
import pstats
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.backends.nvidia.driver as nvidia
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.limits import MULTIPROCESSORS
from blocktune.kernels.portable.decode import scratch
from blocktune.runtime.api.cache import appending
from blocktune.runtime.dispatch import dispatcher, engine, obstacles, resolver
from blocktune.runtime.selection import canary
from tests.support.attention.entry_calls import entry_calls

H200 = device_named("h200")
ROUNDS, CALLS = 1500, 4
PROFILED_CALLS = 2000


class NoGpu(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's driver over a libcuda that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = torch._C._cuda_getDevice
        self.get_current_stream = torch._C._cuda_getCurrentRawStream
        self.get_device_capability = lambda device: (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def build_libcuda(folder: Path) -> None:
    """Compile and load the fake, so that whoever asks for libcuda.so.1 gets it."""
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    knobs.nvidia.libcuda_path = str(folder)


def pretend_gpu() -> None:
    """Let the dispatcher take the CPU for an H200: no result is looked at, since no kernel runs."""
    own: Any = torch._C
    own._cuda_getDevice, own._cuda_getCurrentRawStream = zero, zero
    torch.cuda.is_current_stream_capturing = bool
    torch.cuda.device_of = lambda tensor: nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    for module in (obstacles, dispatcher, appending):
        module.KERNEL_DEVICE = "cpu"
    resolver.current_device = lambda index: H200
    canary.sampled = lambda *_: None
    engine._may_repeat = lambda *_: True
    scratch._larger = larger


def larger(kept: object, device: torch.device, counters: int, floats: int) -> tuple[int, int, Any, Any]:
    """Return what `scratch` keeps, allocated on this thread: Hopper kernels count their tiles in it."""
    del kept
    made = torch.empty(floats, device=device), torch.zeros(counters, dtype=torch.int32, device=device)
    return floats, counters, *made


def zero(*_: Any) -> int:
    return 0


def least_us(call: Callable[[], Any]) -> float:
    """The microseconds of a call in the fastest round."""
    least = float("inf")
    clock = time.perf_counter_ns
    for _ in range(ROUNDS):
        start = clock()
        for _ in range(CALLS):
            call()
        least = min(least, (clock() - start) / CALLS / 1000)
    return least


def print_functions(call: Callable[[], Any], count: int) -> None:
    """Print the functions that take most, with the profiler's own share in each."""
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(PROFILED_CALLS):
            call()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("entries", nargs="*", help="names of calls; all but compiled graphs by default")
    parser.add_argument("--functions", type=int, default=0, help="how many functions to print for each call")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pretend_gpu()
        build_libcuda(Path(folder))
        driver.set_active(NoGpu())
        calls = entry_calls("cpu")
        for name in given.entries or [name for name in calls if not name.startswith("compiled graph")]:
            ours, _ = calls[name]()
            for _ in range(3):
                ours()
            print(f"{name:28s} {least_us(ours):7.2f} us", flush=True)
            if given.functions:
                print_functions(ours, given.functions)


if __name__ == "__main__":
    main()
