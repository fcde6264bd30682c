"""Which parameters of a config decide whether it is fast, by the trials of a sweep or of an autotuned kernel."""

from collections.abc import Mapping, Sequence
from typing import Any

from blocktune.db.records.records import KernelTrial
from blocktune.tuner.lab.sweep_file import Sweep

FEWEST, MOST = 50, 1000
"""Trials with a time. Fewer leave less than five in the fastest tenth; of more, the fastest say as much, sooner."""

LEAST_SHARE = 0.005
"""Of a parameter that is shown."""


def parameter_importance(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the parameters with their shares, which add up to 1 before the least are left out; the greatest first."""
    return _importance([(config.to_json(), score) for config, score in sweep.scores.items()])


def kernel_importance(trials: Sequence[KernelTrial]) -> list[dict[str, Any]]:
    """Return what `parameter_importance` does, by the trials of one key of an autotuned kernel."""
    return _importance([(trial.config.parameters, trial.time_us) for trial in trials if trial.time_us is not None])


def importance_text(shares: Sequence[Mapping[str, Any]]) -> str:
    """Return shares in words: `BLOCK 61 %, num_warps 30 %`."""
    return ", ".join(f"{each['parameter']} {each['share']:.0%}".replace("%", " %") for each in shares)


def _importance(scored: Sequence[tuple[Mapping[str, Any], float]]) -> list[dict[str, Any]]:
    """Return the shares by values and the score of each config, which is smaller for faster ones.

    A share says how much a parameter decides whether a config is among the fastest tenth: PED-ANOVA of Optuna.
    """
    if len(scored) < FEWEST:
        return []
    import optuna
    from optuna.distributions import CategoricalDistribution
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.trial import create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows = sorted(scored, key=lambda row: row[1])[:: -(-len(scored) // MOST)]
    names = dict.fromkeys(name for row, _ in rows for name in row)
    values = {name: sorted({row[name] for row, _ in rows if name in row}, key=repr) for name in names}
    choices = {name: CategoricalDistribution(found) for name, found in values.items() if len(found) > 1}
    study = optuna.create_study()
    for row, score in rows:
        known = {name: value for name, value in row.items() if name in choices}
        study.add_trial(create_trial(params=known, distributions={name: choices[name] for name in known}, value=score))
    shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(evaluate_on_local=False))
    return [{"parameter": name, "share": share} for name, share in shares.items() if share >= LEAST_SHARE]
