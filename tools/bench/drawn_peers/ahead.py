"""Compiles what cells need ahead of the process that times them: ours, and FlashAttention-4's kernels.

Ours are called as they will be timed. FlashAttention-4 keeps compiled kernels in files
(FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED) and compiles them of tensors that are not there, so that no kernel of it runs.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from multiprocessing import get_context

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.bench.drawn_peers.cells import Cell
from tools.bench.drawn_peers.measuring import only_ours
from tools.bench.drawn_peers.peers import FA4, OURS, run_of
from tools.bench.drawn_peers.problem import Problem

COMPILED = (OURS, FA4)
"""Whose kernels are compiled for a shape, in the order in which they are."""


def compile_ahead(cells: list[Cell], peers: Iterable[str], jobs: int, seconds: float) -> set[tuple[int, str]]:
    """Return the number of each cell and whose kernels of it are compiled within the time."""
    end = time.monotonic() + seconds
    names = [name for name in COMPILED if name in {OURS, *peers}]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=only_ours) as pool:
        wanted = [(number, name) for name in names for number in range(len(cells))]
        found = {(number, name): pool.submit(compile_one, cells[number], name) for number, name in wanted}
        ready = {key for key, future in found.items() if _is_done(future, end)}
        pool.shutdown(wait=True, cancel_futures=True)
    return ready


def _is_done(future: Future[None], end: float) -> bool:
    with suppress(TimeoutError, BrokenProcessPool):
        future.result(timeout=max(0.0, end - time.monotonic()))
        return True
    return False


def compile_one(cell: Cell, name: str) -> None:
    """Compile what somebody needs for a cell."""
    with suppress(Exception):  # the process that times says what is wrong with the cell
        with FakeTensorMode() if name == FA4 else nullcontext():
            run_of(name, Problem.of(cell))()
        torch.cuda.empty_cache()
