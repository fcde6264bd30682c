"""The search beyond a list, at the first call of a kernel with `expand`: that of `tune run`, without Optuna."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from blocktune.db.records.records import Outcome
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import BlocktuneError, StoreError
from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import UserConfig
from blocktune.runtime.autotuned.fallback import KernelExplanation, KernelWinner
from blocktune.runtime.autotuned.frozen import add_winner
from blocktune.runtime.selection.ladder import Candidate, Rung
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.tuner.drop_in.known import choice_of
from blocktune.tuner.drop_in.results import Ending, Results
from blocktune.tuner.launches.launches import with_configs
from blocktune.tuner.launches.outputs import OutputCheck
from blocktune.tuner.search.arguments import SearchOptions
from blocktune.tuner.search.kept_study import IN_ORDER
from blocktune.tuner.search.report import TuningReport
from blocktune.tuner.search.tune_launch import LaunchMachine, tune_launch
from blocktune.tuner.subject.costs import NO_COSTS, rates_of

logger = logging.getLogger("blocktune")


def has_room(results: Results) -> bool:
    """Return whether the GPU has the memory to check configs of no list: two copies of the call's tensors."""
    try:
        OutputCheck(results.call)
    except torch.OutOfMemoryError:
        logger.warning(
            "%s: only listed configs are tried, for lack of memory for two copies of its tensors.", results.call.name
        )
        return False
    return True


def searched_choice(results: Results, machine: LaunchMachine) -> KernelExplanation:
    """Return the choice of a search through the list and around its best config; it is stored.

    Raises:
        UsageError: an argument cannot be restored.
        NoFeasibleConfigError: no config compiles and runs.
        KeyboardInterrupt: interrupted; the trials are kept.
    """
    call, device = results.call, results.device
    report, tried = _kept_search(results, machine)
    best = report.best
    rates = rates_of(call, best.config, best.time_us or 0.0, device)
    if rates == NO_COSTS:
        logger.info("%s: %s", call.name, NO_COSTS)
    options = with_configs(call, [best.config]).configs[best.config].all_kwargs()
    call.tuner.pre_hook({**call.named, **options}, reset_only=True)  # the arguments as the launch of the winner expects
    winner = Candidate(
        rung=Rung.EXACT, config=best.config, origin=Origin.MEASURED, tuned_for=call.problem, time_us=best.time_us
    )
    return replace(
        choice_of(call, winner, device),
        rates=rates,
        default_time_us=best.default_time_us,
        tuned=True,
        seconds=report.seconds,
        dropped={
            config.label: f"{ending.outcome}: {ending.error}"
            for config, ending in tried.items()
            if ending.outcome is not Outcome.OK
        },
    )


def _kept_search(results: Results, machine: LaunchMachine) -> tuple[TuningReport, dict[UserConfig, Ending]]:
    """Search in the user's store. Where that fails, search in a temporary one: this process keeps the winner, also for
    other ranks, and a warning says why."""
    call = results.call
    try:
        with _opened(results) as store:
            return _search(results, store, machine)
    except StoreError as error:
        logger.warning("The results of %s are not kept: %s", call.name, error)
    with _temporary_store() as store:
        report, tried = _search(results, store, machine)
    add_winner((results.device.key, call.name, call.source_hash), _winner(call, report))
    return report, tried


@contextmanager
def _temporary_store() -> Iterator[ResultStore]:
    """Yield a store that is forgotten."""
    with tempfile.TemporaryDirectory(prefix="blocktune-") as folder, ResultStore.open(Path(folder) / "x.db") as store:
        yield store


def _opened(results: Results) -> ResultStore:
    """Return the store of a call's results.

    Raises:
        StoreError: it cannot be opened, whatever the reason, such as a BLOCKTUNE_DB that names a results file.
    """
    try:
        return results.open_store()
    except BlocktuneError as error:
        raise StoreError(str(error)) from error


def _search(
    results: Results, store: ResultStore, machine: LaunchMachine
) -> tuple[TuningReport, dict[UserConfig, Ending]]:
    """Search, and return the report and how every config ended.

    Raises:
        StoreError: the store does not answer, or does not take the results.
        KeyboardInterrupt: interrupted; the best so far is no winner.
    """
    report = tune_launch(results.call, results.device, store, SearchOptions(sampler=IN_ORDER), machine=machine)
    if report.interrupted:
        raise KeyboardInterrupt
    return report, replace(results, open_store=lambda: ResultStore.open(store.target)).known()


def _winner(call: Call, report: TuningReport) -> KernelWinner:
    best = report.best
    return TunedConfig(shape=call.listed_problem, config=best.config, origin=Origin.MEASURED, time_us=best.time_us)
