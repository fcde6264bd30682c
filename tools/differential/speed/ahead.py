"""Compiling what drawn cases need ahead of the process that times them."""

import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import torch

from tools.differential.speed.cases import SpeedCase
from tools.differential.speed.contenders import launches_of


def compile_ahead(cases: list[SpeedCase], jobs: int, seconds: float, *, kernels: bool) -> list[SpeedCase]:
    """Return the cases whose kernels are compiled within the time, in the order in which they were drawn."""
    end, ready = time.monotonic() + seconds, []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = [pool.submit(_compile, case, kernels) for case in cases]
        for case, future in zip(cases, found, strict=True):
            with suppress(TimeoutError):
                future.result(timeout=max(0.0, end - time.monotonic()))
                ready.append(case)
        pool.shutdown(wait=False, cancel_futures=True)
    return ready


def _compile(case: SpeedCase, kernels: bool) -> None:
    with suppress(Exception):  # the process that times says what is wrong with the case
        launches_of(case, kernels=kernels)
    torch.cuda.empty_cache()
