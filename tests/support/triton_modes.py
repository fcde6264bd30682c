"""Where kernels run in this process: on a GPU, in Triton's interpreter, or nowhere.

A process has the interpreter or the compiler. Tests of the other one are left out when tests are collected.
"""

import pytest
import triton
from triton import knobs

from blocktune.kernels.hardware.driver import read_driver

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
INTERPRETED = knobs.runtime.interpret
ON_GPU = bool(read_driver().devices) and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"

runs = pytest.mark.runs_kernels
compiled_here = pytest.mark.compiles_kernels

ABSENT = {"runs_kernels": not ON_GPU and not INTERPRETED, "compiles_kernels": INTERPRETED}
"""Whether this process cannot do what the marker needs."""
