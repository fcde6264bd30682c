"""The search beyond a list, at the first call of a kernel with `expand`: that of `tune run`, without Optuna."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from blocktune.db.records.records import KernelTrial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import StoreError
from blocktune.runtime.autotuned.boundary import warn_of_failure
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.tuner.drop_in.list_race import reasons_of
from blocktune.tuner.drop_in.results import CallResults, keep_here, measured_choice
from blocktune.tuner.launches.launch_runner import LaunchMachine
from blocktune.tuner.launches.launches import prepare_arguments
from blocktune.tuner.launches.outputs import OutputCheck
from blocktune.tuner.search.arguments import SearchOptions
from blocktune.tuner.search.kept_study import IN_ORDER
from blocktune.tuner.search.report import TuningReport
from blocktune.tuner.search.tune_launch import tune_launch
from blocktune.tuner.subject.costs import NO_COSTS

logger = logging.getLogger("blocktune")


def has_room(call: AutotunedCall) -> bool:
    """Return whether the GPU has the memory to check configs of no list: two copies of the call's tensors."""
    try:
        OutputCheck(call)
    except torch.OutOfMemoryError:
        logger.warning("%s: only listed configs are tried, for lack of memory for copies of its tensors.", call.name)
        return False
    return True


def searched_choice(results: CallResults, machine: LaunchMachine) -> KernelExplanation:
    """Return the choice of a search through the list and around its best config; it is stored.

    Raises:
        UsageError: an argument cannot be restored.
        NoFeasibleConfigError: no config compiles and runs.
        KeyboardInterrupt: interrupted; the trials are kept.
    """
    report, tried = _kept_search(results, machine)
    times_us = {config: trial.time_us for config, trial in tried.items() if trial.time_us is not None}
    best = report.best
    choice = measured_choice(results.subject, best, tried.get(best.config), reasons_of(tried), report.seconds, times_us)
    if choice.rates == NO_COSTS:
        logger.info("%s: %s", results.subject.call.name, NO_COSTS)
    prepare_arguments(results.subject.call, best.config)
    return choice


def _kept_search(results: CallResults, machine: LaunchMachine) -> tuple[TuningReport, dict[LaunchConfig, KernelTrial]]:
    """Search in the user's store. Where that fails, search in a temporary one: this process keeps the winner, also for
    other ranks, and a warning says why."""
    try:
        with _opened(results) as store:
            return _search(results, store, machine)
    except StoreError as error:
        warn_of_failure(results.subject.call.name, "a store of its results", error)
    with _temporary_store() as store:
        found = _search(results, store, machine)
    keep_here(found[0].best)
    return found


@contextmanager
def _temporary_store() -> Iterator[ResultStore]:
    """Yield a store that is forgotten."""
    with tempfile.TemporaryDirectory(prefix="blocktune-") as folder, ResultStore.open(Path(folder) / "x.db") as store:
        yield store


def _opened(results: CallResults) -> ResultStore:
    """Return the store of a call's results.

    Raises:
        StoreError: it cannot be opened, whatever the reason, such as a BLOCKTUNE_DB that names a results file.
    """
    try:
        return results.open_store(results.lock_timeout_seconds)
    except Exception as error:  # whatever is wrong with a place
        raise StoreError(str(error)) from error


def _search(
    results: CallResults, store: ResultStore, machine: LaunchMachine
) -> tuple[TuningReport, dict[LaunchConfig, KernelTrial]]:
    """Search, and return the report and how every config ended.

    Raises:
        StoreError: the store does not answer, or does not take the results.
        KeyboardInterrupt: interrupted; the best so far is no winner.
    """
    subject = results.subject
    report = tune_launch(subject.call, subject.device, store, SearchOptions(sampler=IN_ORDER), machine=machine)
    if report.interrupted:
        raise KeyboardInterrupt
    return report, results.trials_in(store)
