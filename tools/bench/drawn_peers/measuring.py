"""Checks and times all who compute a cell, in one process on a GPU."""

import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.dispatcher import attention
from blocktune.runtime.selection import pytorch_rival
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.protocol import median_ratio
from tools.bench.drawn_peers import flash3_backward
from tools.bench.drawn_peers.cells import Cell
from tools.bench.drawn_peers.pages_in_float32 import attend_pages
from tools.bench.drawn_peers.peers import FA3, OTHERS, OURS, PYTORCH, run_of
from tools.bench.drawn_peers.problem import Problem, Run
from tools.differential.runs.served import ServedBy

ROUNDS = (9, 41)
ROUNDS_US = 400_000.0
"""Of all rounds of a cell, within `ROUNDS`."""
HEAT_SECONDS = 0.05
MAX_DIFFERENCE = 0.02
"""Of a result from another one, relative to its norm: roundings to 16 bits leave about 0.005."""

Say = Callable[[str], None]
"""Takes the name of whose turn it is, so that a process that ends or hangs can be understood."""

reason_for_pytorch = pytorch_rival.reason_for_pytorch


class ContextLostError(Exception):
    """The CUDA context has ended: nothing runs in this process any more."""


def only_ours() -> None:
    """Let our kernels serve also the calls for which the dispatcher would take PyTorch's."""
    pytorch_rival.reason_for_pytorch = _no_reason


def _no_reason(*shape_and_device: Any, **more: Any) -> str | None:
    """Return that nothing speaks for PyTorch's kernels."""
    del shape_and_device, more
    return None


class Measuring:
    """Measures a cell after the other."""

    def __init__(self, clock: CudaClock, say: Say, served: ServedBy) -> None:
        self._clock, self._say, self._served, self._random = clock, say, served, random.Random(0)

    def row(self, cell: Cell, peers: Iterable[str], refused: Mapping[str, str]) -> dict[str, Any]:
        """Return what was measured of a cell.

        Args:
            cell: the cell.
            peers: who takes part besides ours.
            refused: whom of them to leave out, and why.

        Raises:
            ContextLostError: somebody's kernel has ended the CUDA context.
        """
        row: dict[str, Any] = {**cell.to_json(), "label": cell.shape.label, "refused": dict(refused)}
        try:
            return row | self._measured(cell, peers, row["refused"])
        except ContextLostError:
            raise
        except Exception as error:
            check_context(error)
            return row | {"error": first_line(error)}
        finally:
            with suppress(RuntimeError):  # of a lost context
                torch.cuda.empty_cache()

    def _measured(self, cell: Cell, peers: Iterable[str], refused: dict[str, str]) -> dict[str, Any]:
        problem, row = Problem.of(cell), expected_of(cell)
        runs, reference, row["checked_with"] = self._peers_of(problem, peers, refused)
        self._say(OURS)
        runs = {OURS: run_of(OURS, problem), **runs}
        found = runs[OURS]()
        torch.cuda.synchronize()
        if reference is not None and (wrong := difference_in_words(found, reference)):
            raise UsageError(f"Ours are wrong: {wrong} from {row['checked_with']}.")
        del found, reference
        row["served_by"] = self._kernels_of_ours()
        if "pytorch_would_serve" in row:
            self._say(PYTORCH)
            runs[PYTORCH] = run_of(PYTORCH, problem)
        row |= summary_of(self._rounds(runs))
        if FA3 in peers and cell.is_backward and FA3 not in row["times_us"]:
            row |= self._with_flash3(problem, runs[OURS], row, refused)
        return row | fastest_of(row["ratios"])

    def _kernels_of_ours(self) -> list[str]:
        """Return the kernels that have served our calls of this cell.

        Raises:
            UsageError: PyTorch has served some, or a config did not launch.
        """
        kernels, failed = self._served.since_last(), self._served.failed_launches()
        if failed or "pytorch" in kernels:
            raise UsageError(f"Ours did not serve it, but {', '.join(kernels)}. {'; '.join(failed)}")
        return kernels

    def _peers_of(
        self, problem: Problem, peers: Iterable[str], refused: dict[str, str]
    ) -> tuple[dict[str, Run], tuple[Tensor, ...] | None, str | None]:
        """Return the peers that compute a problem, the results of the first of them, and its name."""
        runs: dict[str, Run] = {}
        reference: tuple[Tensor, ...] | None = None
        by = None
        if problem.shape.features.page_size:
            reference, by = (attend_pages(problem),), "float32"
        apart = {FA3} if problem.cell.is_backward else set()
        for name in (name for name in OTHERS if name in peers and name not in {*refused, *apart}):
            self._say(name)
            try:
                run = run_of(name, problem)
                found = run()
                torch.cuda.synchronize()
            except Exception as error:  # whatever a peer raises of what it does not compute
                check_context(error)
                refused[name] = first_line(error)
                continue
            if reference is None:
                reference, by = found, name
            elif wrong := difference_in_words(found, reference):
                refused[name] = f"wrong: {wrong} from {by}"
                continue
            runs[name] = run
        return runs, reference, by

    def _rounds(self, runs: Mapping[str, Run]) -> dict[str, list[float]]:
        """Return the times of everybody by round, in microseconds, taken in random order."""
        self._say("rounds")
        launches: dict[str, Any] = dict(runs)
        self._clock.heat(launches[OURS], HEAT_SECONDS)
        once = self._clock.rounds(list(launches.values()), 1)[0]
        count = max(ROUNDS[0], min(ROUNDS[1], int(ROUNDS_US / sum(once))))
        times: dict[str, list[float]] = {name: [] for name in launches}
        for _ in range(count):
            order = self._random.sample(list(launches), len(launches))
            taken = self._clock.rounds([launches[name] for name in order], 1)[0]
            for name, time_us in zip(order, taken, strict=True):
                times[name].append(time_us)
        return times

    def _with_flash3(
        self, problem: Problem, ours: Run, row: Mapping[str, Any], refused: dict[str, str]
    ) -> dict[str, Any]:
        """Return the times and ratios with FlashAttention-3's backward, of its kernels and ours alone."""
        self._say(FA3)
        try:
            if FA3 in refused:
                return {}
            theirs = flash3_backward.backward_run(problem)
            if wrong := difference_in_words(theirs(), ours()):
                raise UsageError(f"wrong: {wrong} from ours")
            ours_us, theirs_us = flash3_backward.kernel_times_us(ours, theirs)
        except Exception as error:
            check_context(error)
            refused[FA3] = first_line(error)
            return {}
        kernels = {OURS: round(ours_us, 2), FA3: round(theirs_us, 2)}
        return {"kernels_us": kernels, "ratios": {**row["ratios"], FA3: round(theirs_us / ours_us, 4)}}


def expected_of(cell: Cell) -> dict[str, Any]:
    """Return what should serve an untuned call of ours, and why the dispatcher would take PyTorch's, if it would."""
    found = attention.explain(cell.shape)
    if found.config is None:
        raise UsageError(f"No kernel of ours serves it: {found.reason}")
    reason = reason_for_pytorch(cell.shape, current_device().key)
    served = {"kernel": found.config.kernel, "config": found.label, "rung": str(found.rung)}
    return served if reason is None else served | {"pytorch_would_serve": reason}


def summary_of(times: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return medians, and the medians of how many times as long everybody takes as ours in the same round."""
    own = times[OURS]
    ratios = {name: round(median_ratio(taken, own), 4) for name, taken in times.items() if name not in (OURS, PYTORCH)}
    medians = {name: round(statistics.median(taken), 2) for name, taken in times.items()}
    return {"times_us": medians, "ratios": ratios, "rounds": len(own)}


def fastest_of(ratios: Mapping[str, float]) -> dict[str, Any]:
    """Return the fastest peer and its time over ours; nothing without peers."""
    if not ratios:
        return {}
    fastest = min(ratios, key=lambda name: ratios[name])
    return {"fastest": fastest, "ratio": ratios[fastest]}


def difference_in_words(found: Iterable[Tensor], reference: Iterable[Tensor]) -> str | None:
    """Return by how much results differ from others in their norm, where that is more than roundings leave."""
    for number, (one, other) in enumerate(zip(found, reference, strict=True)):
        expected = other.float()
        away = float((one.float() - expected).norm() / expected.norm())
        if not away <= MAX_DIFFERENCE:  # NaN as well
            return f"result {number} differs by {away:.3f}"
    return None


def check_context(error: Exception) -> None:
    """Raises ContextLostError if the CUDA context has ended with an error."""
    try:
        torch.cuda.synchronize()
    except Exception:
        raise ContextLostError(first_line(error)) from error


def first_line(error: Exception) -> str:
    """Return what an error says, in a line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
