"""Compiles that a page requests: queued, one at a time, each in a process of its own, and cancellable."""

import itertools
import threading
import time
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from blocktune.cli.shared.compiled_config import CompileRequest, default_request
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compile.compiler import CompileResult, compile_key
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.cost.analysis import analyse
from blocktune.tuner.cost.term_texts import terms_of
from blocktune.tuner.cost.text import text_of_analysis
from blocktune.tuner.measure.device_choice import DEFAULT_DEVICE

MAX_WAITING = 20
"""Compiles that may wait at once."""

KEPT = 200
"""Compiles whose results a page can still ask for."""

Answer = dict[str, Any]


@dataclass(slots=True)
class WhatIfJob:
    """A compile that was requested.

    cancelled: a page has dropped it.
    """

    id: int
    request: CompileRequest
    device: DeviceSpec
    future: Future[CompileResult]
    begun: float = field(default_factory=time.perf_counter)
    seconds: float | None = None
    cancelled: bool = False
    answer: Answer | None = None

    @property
    def state(self) -> str:
        """How far it is: `waiting`, `compiling`, `done` or `cancelled`."""
        if self.cancelled:
            return "cancelled"
        if self.future.done():
            return "done"
        return "compiling" if self.future.running() else "waiting"


class WhatIfs:
    """Compiles of configs that may never have been compiled before. Any thread may call it.

    Args:
        farm: of one worker, which takes the compiles in the order in which they came.
    """

    def __init__(self, farm: CompileFarm) -> None:
        self._farm = farm
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._jobs: OrderedDict[int, WhatIfJob] = OrderedDict()

    def prepare(self) -> None:
        """Start the worker and load the compiler here, so that the first compile waits for neither."""
        self._farm.start()
        limits = device_named(DEFAULT_DEVICE).limits
        first = default_request("flash_fwd", complete_shape(4096, 64), limits)
        compile_key(first.kernel.compile_spec(first.config, first.shape), limits.cc)

    def ask(self, request: CompileRequest, device: DeviceSpec) -> Answer:
        """Put a config into the queue and return how far it is; one that was compiled before is done at once.

        Raises:
            UsageError: too many wait.
        """
        with self._lock:
            waiting = sum(job.state in ("waiting", "compiling") for job in self._jobs.values())
            if waiting >= MAX_WAITING:
                raise UsageError(f"At most {MAX_WAITING} compiles wait at once, but {waiting} do. Cancel one or wait.")
            begun = time.perf_counter()
            future = self._farm.submit(request.config.kernel, request.config, request.shape, request.limits.cc)
            job = WhatIfJob(next(self._numbers), request, device, future, begun)
            self._jobs[job.id] = job
            while len(self._jobs) > KEPT:
                self._jobs.popitem(last=False)
        future.add_done_callback(lambda _: _stop_clock(job))
        return self.state(job.id)

    def state(self, number: int) -> Answer:
        """Return how far a compile is, and what it found.

        Raises:
            UsageError: there is no such compile.
        """
        job = self._job(number)
        with self._lock:
            order = [each.id for each in self._jobs.values() if each.state in ("waiting", "compiling")]
        if job.state == "done" and job.answer is None:
            job.answer = _answer(job)
        return {
            "id": job.id,
            "state": job.state,
            "config": job.request.config.label,
            "ahead": order.index(job.id) if job.id in order else 0,
            "seconds": job.seconds,
            "answer": job.answer,
        }

    def cancel(self, number: int) -> Answer:
        """Drop a compile that waits, or end one that runs; one that is done stays. Return how far it is then.

        Raises:
            UsageError: there is no such compile.
        """
        job = self._job(number)
        if not job.future.done():
            job.cancelled = True
            self._farm.abort(job.future)
        return self.state(number)

    def close(self) -> None:
        """End what is compiling."""
        self._farm.close()

    def _job(self, number: int) -> WhatIfJob:
        with self._lock:
            job = self._jobs.get(number)
        if job is None:
            raise UsageError(f"No such compile: number {number}. Request it again.")
        return job


def _stop_clock(job: WhatIfJob) -> None:
    job.seconds = time.perf_counter() - job.begun


def _answer(job: WhatIfJob) -> Answer:
    """Return what a compile that is done has found."""
    try:
        result = job.future.result()
    except (CancelledError, RuntimeError) as error:  # the server ends, or no worker comes up
        return {"outcome": "compile_error", "error": str(error) or "The server is ending."}
    config = job.request.config
    facts: Answer = {"outcome": str(result.outcome), "error": result.error, "config": config.to_json()}
    if result.code is None:
        return facts
    analysis = analyse(job.request.kernel, config, job.request.shape, job.device, result.code)
    breakdown = analysis.breakdown
    return facts | {
        "cached": result.cached,
        "resources": result.code.resources.to_json(),
        "occupancy": analysis.occupied.to_json(),
        "predicted_us": None if breakdown is None else breakdown.total_us,
        "predicted": analysis.predicted_text,
        "flops": analysis.flops,
        "terms": [] if breakdown is None else _terms(job, breakdown.to_json()),
        "words": text_of_analysis(analysis),
    }


def _terms(job: WhatIfJob, breakdown: Answer) -> list[Answer]:
    """Return what each unit takes alone by the model, the longest first."""
    named = terms_of(job.request.shape)
    rows = [{"term": words, "us": breakdown[f"{name}_us"]} for name, words in named.items()]
    return sorted((row for row in rows if row["us"]), key=lambda row: row["us"], reverse=True)
