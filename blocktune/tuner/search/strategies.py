"""The search strategies by name. All ask and tell an Optuna study; see `studies.py` for how each is made.

`tune run` uses `DEFAULT`, and `tune lab replay` compares them on recorded sweeps; notes/models/search.md has what came
of it. This file imports no Optuna, so that a command line which only names them stays fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from blocktune.db.records.records import ConfigT
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.sampling.own_sampler import sampler_class

if TYPE_CHECKING:
    from optuna.study import Study

    from blocktune.tuner.candidates.assignment import Assignment
    from blocktune.tuner.sampling.study_proposals import StudyProposals


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """chance: whether the seed matters. about: what it is, in a line. needs: packages that Optuna does not bring."""

    chance: bool
    about: str
    needs: tuple[str, ...] = ()


DEFAULT = "guided"

STRATEGIES: Mapping[str, Strategy] = {
    "guided": Strategy(chance=False, about="the model, corrected by every measurement"),
    "model": Strategy(chance=False, about="the model's order"),
    "tpe_from_model": Strategy(chance=True, about="Optuna's TPESampler after the model's favourites"),
    "tpe": Strategy(chance=True, about="Optuna's TPESampler after random configs"),
    "gp": Strategy(chance=True, about="Optuna's GPSampler after the model's favourites", needs=("scipy",)),
    "cmaes": Strategy(chance=True, about="Optuna's CmaEsSampler after the model's favourites", needs=("cmaes",)),
    "coordinate": Strategy(chance=True, about="coordinate descent from the default"),
    "random": Strategy(chance=True, about="random configs"),
    "enumeration": Strategy(chance=False, about="every config in the order of the space"),
}


def make_proposals(
    assignment: "Assignment[ConfigT]", strategy: str = DEFAULT, study: "Study | None" = None
) -> "StudyProposals[ConfigT]":
    """Return what a search by a strategy asks for the next config.

    Args:
        assignment: what is searched, and in how many trials.
        strategy: a name of `STRATEGIES`, or `package.module:Class` of a sampler of Optuna's kind.
        study: what proposes configs and gets their results; None is one in memory.

    Raises:
        UsageError: there is no such strategy or class, or it needs a package that is not installed.
    """
    require_strategy(strategy)
    from blocktune.tuner.sampling.study_storage import open_study
    from blocktune.tuner.search import studies

    study = study or open_study("search")
    make = studies.MAKERS.get(strategy)
    return studies.by_class(strategy, assignment, study) if make is None else make(assignment, study)


def require_strategy(name: str) -> None:
    """Check the name of a strategy; Optuna is imported for the path of a class alone.

    Raises:
        UsageError: it is neither a name of `STRATEGIES` nor the path of a sampler's class, or it lacks a package.
    """
    if name not in STRATEGIES and ":" not in name:
        raise UsageError(
            f"No such strategy: {name!r}. Name one of {', '.join(STRATEGIES)}, or an Optuna sampler as "
            "package.module:Class."
        )
    if name not in STRATEGIES:
        sampler_class(name)
    missing = _missing(name)
    if missing:
        raise UsageError(
            f"The strategy {name} needs packages that are not installed: {', '.join(missing)}. "
            f"Run `pip install {' '.join(missing)}`, or take another strategy."
        )


def installed_strategies() -> list[str]:
    """Return the strategies that lack no package."""
    return [name for name in STRATEGIES if not _missing(name)]


def has_chance(name: str) -> bool:
    """Return whether the seed of a strategy matters; that of a class may."""
    return name not in STRATEGIES or STRATEGIES[name].chance


def _missing(name: str) -> list[str]:
    needs = STRATEGIES[name].needs if name in STRATEGIES else ()
    return [package for package in needs if find_spec(package) is None]
