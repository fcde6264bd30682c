"""What configs cost that hang on the GPU or write where no memory is, and what the kernel computes all the same."""

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton

from blocktune.runtime.autotuned.kernel import kernels
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.drop_in import tune_call
from blocktune.tuner.drop_in.install import install, uninstall
from blocktune.tuner.measure.environment import source_commit
from blocktune.tuner.measure.worker_process import Deadlines
from tests.support.libraries.autotuned_kernels import HARMLESS, harmful_kernel

ANSWER_SECONDS = 8.0
"""After which a config hangs, here; a minute for users."""

ELEMENTS = 1 << 20


def faulty_configs(device: str) -> dict[str, Any]:
    """Return how the configs of a kernel ended of which one hangs and one faults, and whether its result is that of
    Triton's own tuner without these two."""
    expected = torch.zeros(ELEMENTS, device=device)
    _launch(triton.autotune(HARMLESS, ["n"])(harmful_kernel.fn), expected)
    install(settings=Settings(isolate=True))
    hasty = replace(tune_call.machine(), deadlines=Deadlines(compiling=ANSWER_SECONDS))
    try:
        found, begin = torch.zeros(ELEMENTS, device=device), time.monotonic()
        with mock.patch.object(tune_call, "machine", return_value=hasty):
            _launch(harmful_kernel, found)
        seconds = time.monotonic() - begin
        (kernel,) = (each for each in kernels if each.tuner is harmful_kernel)
        (choice,) = kernel.choices.values()
    finally:
        uninstall()
    return {
        "kernel": kernel.name,
        "commit": source_commit(),
        "configs": len(harmful_kernel.configs),
        "lost": dict(choice.dropped or {}),
        "winner": choice.label,
        "equal": torch.equal(found, expected),
        "answer_seconds": ANSWER_SECONDS,
        "seconds": seconds,
    }


def _launch(kernel: Any, x: torch.Tensor) -> None:
    never = torch.zeros(1, dtype=torch.int32, device=x.device)
    kernel[lambda meta: (triton.cdiv(ELEMENTS, meta["BLOCK"]),)](x, never, ELEMENTS)
