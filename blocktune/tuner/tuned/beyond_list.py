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
from blocktune.kernels.selection.ladder import Candidate, Rung
from blocktune.kernels.tuned.fallback import KernelExplanation
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import StoreError
from blocktune.tuner.search.arguments import SearchOptions
from blocktune.tuner.search.kept_study import IN_ORDER
from blocktune.tuner.search.tune_launch import LaunchMachine, tune_launch
from blocktune.tuner.subject.costs import NO_COSTS, rates_of
from blocktune.tuner.tuned.known import choice_of
from blocktune.tuner.tuned.results import Results
from blocktune.tuner.turns.launches import with_configs
from blocktune.tuner.turns.outputs import OutputCheck

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
    """
    call, device = results.call, results.device
    with _store(results) as store:
        report = tune_launch(call, device, store, SearchOptions(sampler=IN_ORDER), machine=machine)
        tried = replace(results, open_store=lambda: ResultStore.open(store.label)).known()
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


@contextmanager
def _store(results: Results) -> Iterator[ResultStore]:
    """Yield the store of a call's results; one that is forgotten, with a warning, where that is away."""
    try:
        store = results.open_store()
    except StoreError as error:
        logger.warning("The results of %s are not kept: %s", results.call.name, error)
        with tempfile.TemporaryDirectory(prefix="blocktune-") as folder, ResultStore.open(Path(folder) / "x.db") as own:
            yield own
        return
    with store:
        yield store
