"""A thread of its own for work that a capture, a memory pool or a dispatch mode of the caller must not reach.

PyTorch routes allocations to the pool of a CUDA graph, or of the user's `torch.cuda.MemPool`, by thread and by
capturing stream. Modes such as `torch.inference_mode` and `torch.device` hold for one thread as well.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from blocktune.kernels.hardware.driver import load_library

Result = TypeVar("Result")

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED, CUDA driver API."""


def run_on_side_thread(task: Callable[[], Result], device: Any) -> Result:
    """Return the result of a task that runs on its own thread, on a CUDA device's default stream.

    The work that it has enqueued there is done when this returns. A capture in the calling thread stays valid: the
    task may load kernels, allocate and wait.
    """
    import torch

    results: Future[Result] = Future()

    def run() -> None:
        try:
            stream = torch.cuda.default_stream(device)
            with relaxed_capture(), torch.cuda.stream(stream):
                try:
                    result = task()
                finally:
                    stream.synchronize()  # also after an error: memory may be freed that the stream still writes
        except BaseException as error:  # the calling thread raises it
            results.set_exception(error)
        else:
            results.set_result(result)

    # no executor: its threads cannot start once the main thread has ended
    threading.Thread(target=run, name="blocktune-side").start()
    return results.result()


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread load kernels, allocate and wait while another thread captures a CUDA graph."""
    library, mode = load_library(), ctypes.c_int(_RELAXED)
    if library is None:
        yield
        return
    exchange = library.cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
