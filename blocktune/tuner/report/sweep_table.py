"""A sweep as the report shows it: plain values, of which the page computes nothing that Python did not."""

from typing import Any

from blocktune.db.records.records import Outcome, Trial
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.cost.analysis import analyse
from blocktune.tuner.cost.bands import band_text
from blocktune.tuner.cost.term_texts import terms_of
from blocktune.tuner.cost.text import text_of_analysis
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.measure.protocol import TIE_BAND
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.report.device_table import ceilings, limits_json
from blocktune.tuner.report.empty_cells import empty_cells
from blocktune.tuner.report.importance import parameter_importance
from blocktune.tuner.report.on_chip_table import on_chip_table
from blocktune.tuner.report.trial_columns import in_order, trial_columns


def sweep_table(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep with its columns, its empty cells and its explained winner."""
    trials = in_order(sweep.trials)
    layouts, numbers = on_chip_table(sweep, [trial.config for trial in trials])
    return {
        "label": sweep.label,
        "shape_label": sweep.shape.label,
        "shape": sweep.shape.to_json(),
        "flops": sweep.shape.flops,
        "device": sweep.device.name,
        "limits": limits_json(sweep.device.limits),
        "num_sms": sweep.device.num_sms,
        "regime": str(sweep.environment.regime),
        "environment": sweep.environment.to_json(),
        "measured_on": trials[-1].created_at.date().isoformat(),
        "ceilings": ceilings(sweep.device, sweep.shape.dtype),
        "terms": {f"{name}_us": words for name, words in terms_of(sweep.shape).items()},
        "bands": {kernel: band_text(kernel, sweep.shape, sweep.device) for kernel in KERNELS},
        "tie_band": TIE_BAND,
        "columns": trial_columns(sweep, trials) | {"layout": numbers},
        "layouts": layouts,
        "empty_cells": [cell.to_json() for cell in empty_cells(sweep)],
        "importance": parameter_importance(sweep),
        "explanation": explanation(sweep),
    }


def explanation(sweep: Sweep) -> str:
    """Return the fastest config in words; empty where nothing was timed, its kernel is not known here, or what its code
    asks of shared memory was not recorded."""
    best = _fastest(sweep)
    code = None if best is None else CompiledCode.recorded(best.resources)
    if best is None or code is None or best.config.kernel not in KERNELS:
        return ""
    kernel = KERNELS[best.config.kernel]
    try:
        analysis = analyse(kernel, best.config, sweep.shape, sweep.device, code, measured_us=best.time_us)
    except (KeyError, UsageError):  # parameters of another version of the kernel
        return ""
    return text_of_analysis(analysis)


def _fastest(sweep: Sweep) -> Trial | None:
    timed = [trial for trial in sweep.trials if trial.outcome is Outcome.OK and trial.time_us]
    scores = sweep.scores
    return min(timed, key=lambda trial: scores[trial.config], default=None)
