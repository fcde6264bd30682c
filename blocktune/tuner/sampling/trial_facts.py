"""A stored trial as a trial of a study: its user attributes, its rounds, and how it ended."""

import statistics
from typing import Any

from blocktune.db.exchange.document import document_from
from blocktune.db.records.records import AnyTrial, Outcome

RECORD = "record"
"""The user attribute that holds all of a trial, as an export has it."""


def score_of(trial: AnyTrial) -> float | None:
    """Return what the search minimises; None if the config cannot run."""
    if trial.outcome is Outcome.PREDICTED:
        return trial.predicted_us
    return trial.relative_to_anchor if trial.outcome is Outcome.OK else None


def user_attributes(trial: AnyTrial) -> dict[str, Any]:
    """Return what is known of a trial apart from its parameters and its value."""
    compiled = trial.resources
    facts: dict[str, Any] = {
        "config": trial.config.label,
        "outcome": str(trial.outcome),
        "error": trial.error,
        "time_us": trial.time_us,
        "predicted_us": trial.predicted_us,
        "blocks_per_sm": trial.blocks_per_sm,
        "limiters": list(trial.limiters),
        "registers": None if compiled is None else compiled.registers,
        "spill_bytes": None if compiled is None else compiled.spill_bytes,
        "shared_bytes": None if compiled is None else compiled.shared_bytes,
    }
    (facts[RECORD],) = document_from(trial.device, (), (trial,))["trials"]
    return {name: value for name, value in facts.items() if value not in (None, "", [])}


def medians(trial: AnyTrial, score: float | None) -> dict[int, float]:
    """Return the median after every round, in the unit of the score, which is that of all rounds."""
    if score is None or not trial.samples_us:
        return {}
    samples = trial.samples_us
    scale = score / statistics.median(samples)
    return {step: scale * statistics.median(samples[: step + 1]) for step in range(len(samples))}
