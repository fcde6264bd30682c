"""Our occupancy against NVIDIA's `cuda_occupancy.h`, which the triton wheel carries, on random cases.

The header is compiled where it lies and never copied. A CUDA toolkit's newer copy, if there is one, is asked as well:
it knows compute capabilities that the wheel's does not.
"""

import importlib.util
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from blocktune.kernels.hardware.limits import WARP_SIZE, ComputeLimits, known_ccs, limits_for
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.tuner.occupancy.calculator import Limiter, Occupancy, occupancy, shared_bytes_for
from tools import ROOT

pytestmark = pytest.mark.triton_free

CASES = 40_000
UNLIMITED = 2**31 - 1
SOURCE = ROOT / "tools" / "checks" / "occupancy_header.cpp"
Case = tuple[ComputeLimits, KernelResources, int | None]


def _header_folders() -> list[Path]:
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent / "backends" / "nvidia" / "include"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    return [wheel, *([toolkit] if (toolkit / "cuda_occupancy.h").is_file() else [])]


def _random_case(rng: random.Random, limits: ComputeLimits) -> Case:
    """Half of the sizes are at a threshold of the inverse, one byte below or above; ties and failures are frequent."""
    threshold = shared_bytes_for(rng.randint(1, 16), limits) or 0
    anywhere = rng.randint(0, limits.shared_per_block_optin_bytes + 2048)
    static = rng.choice((0, 0, 0, rng.randint(1, 8192)))
    dynamic = rng.choice((0, anywhere, threshold + rng.randint(-1, 1) - static, threshold))
    resources = KernelResources(
        num_warps=rng.choice((1, 2, 4, 8, 16, 32, rng.randint(1, 34))),
        registers=rng.choice((0, rng.randint(1, 260), 8 * rng.randint(1, 32))),
        shared_bytes=max(0, dynamic),
        static_shared_bytes=static,
        barriers=rng.choice((1, 1, 1, rng.randint(0, 16))),
        tensor_cores="none",
    )
    return limits, resources, rng.choice((None, None, rng.randint(0, 100)))


def _line(case: Case, cc: tuple[int, int]) -> str:
    limits, resources, carveout = case
    numbers = (
        *cc,
        limits.max_warps_per_sm * WARP_SIZE,
        limits.registers_per_block,
        limits.registers_per_sm,
        limits.shared_per_sm_bytes,
        limits.shared_per_block_optin_bytes,
        limits.shared_reserved_bytes,
        resources.threads,
        resources.registers,
        resources.static_shared_bytes,
        resources.shared_bytes,
        resources.barriers,
        -1 if carveout is None else carveout,
    )
    return " ".join(map(str, numbers))


def _as_header(result: Occupancy) -> tuple[int, ...]:
    """Our answer in the order, and with the bits, of the header's."""
    order = (Limiter.WARPS, Limiter.BLOCKS, Limiter.REGISTERS, Limiter.SHARED_MEMORY, Limiter.BARRIERS)
    bits = dict(zip(order, (1, 8, 2, 4, 16), strict=True))
    limits = (result.limit_blocks[name] for name in order)
    mask = sum(bits[name] for name in result.limiters)
    numbers = (UNLIMITED if limit is None else limit for limit in limits)
    return (0, *numbers, result.blocks_per_sm, mask, result.block_shared_bytes)


class Header:
    """The compiled header of one folder."""

    def __init__(self, folder: Path, build: Path) -> None:
        self._program = build / "occupancy_header"
        command = ["g++", "-O1", "-w", "-I", str(folder), str(SOURCE), "-o", str(self._program)]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def ask(self, lines: list[str]) -> list[tuple[int, ...]]:
        done = subprocess.run([self._program], input="\n".join(lines), check=True, capture_output=True, text=True)
        return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]

    def spelling(self, limits: ComputeLimits) -> tuple[int, int] | None:
        """The number under which the header knows this row, None if it does not."""
        case = (limits, KernelResources(num_warps=4, registers=32, shared_bytes=0, tensor_cores="none"), None)
        for cc in (limits.cc, (10, 1)) if limits.cc == (11, 0) else (limits.cc,):
            if self.ask([_line(case, cc)])[0][0] == 0:
                return cc
        return None


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("seed", [20, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (21, 22))])
@pytest.mark.parametrize("folder", _header_folders(), ids=lambda folder: folder.parent.name)
def test_equal_to_nvidias_header(folder: Path, seed: int, tmp_path: Path) -> None:
    header = Header(folder, tmp_path)
    spellings = {limits: header.spelling(limits) for limits in map(limits_for, known_ccs())}
    known = [limits for limits, cc in spellings.items() if cc is not None]
    unknown = {limits.name for limits, cc in spellings.items() if cc is None}
    assert unknown <= {"10.3", "12.1"}  # newer than CUDA 12.8, whose header is in triton 3.6

    rng = random.Random(seed)
    cases = [_random_case(rng, rng.choice(known)) for _ in range(CASES)]
    answers = header.ask([_line(case, spellings[case[0]] or case[0].cc) for case in cases])
    assert len(answers) == CASES
    different = [
        (case, answer)
        for case, answer in zip(cases, answers, strict=True)
        if answer != _as_header(occupancy(case[1], case[0], carveout_percent=case[2]))
    ]
    assert different == []
    assert sum(answer[6] == 0 for answer in answers) > 1000  # launches that fail are among them
    assert len({answer[7] for answer in answers}) > 15  # and many kinds of ties
