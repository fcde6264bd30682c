"""An analysis in words: what binds, what would lift it, and how much the model can be trusted here."""

from blocktune.tuner.analysis import Analysis
from blocktune.tuner.cost_model import OLDER_MMA_SHARE
from blocktune.tuner.occupancy_text import explain as explain_occupancy
from blocktune.tuner.roofline import exp_over_products

TERMS = {
    "tensor": "matrix products",
    "exp": "exponentials of the softmax",
    "arithmetic": "other arithmetic of the softmax",
    "spill": "registers spilled to local memory",
    "l2": "keys and values from L2",
    "hbm": "device memory",
    "latency": "waiting for no unit: barriers, reductions, first results",
    "edge": "prologues and epilogues of blocks",
    "tail": "an uneven last wave",
}
"""What each term of the cost model stands for."""

LIFTS = {
    "tensor": "it is the work itself: only tiles with fewer masked or padded scores do less of it.",
    "exp": "their number is the number of scores, whatever the blocks; what helps is to compute them while products "
    "run, by more resident blocks or a `schedule` that runs ahead.",
    "arithmetic": "a schedule without a running maximum (`schedule` 2) has the least of it; more resident blocks hide "
    "it behind products.",
    "spill": "smaller blocks or more warps leave more registers for each row.",
    "l2": "a larger block_m uses every key more often; block_n does not matter to it.",
    "hbm": "no block sizes reduce what must be read at least once; splitting the keys over more blocks would keep more "
    "reads in flight.",
    "latency": "more resident blocks or warps fill it: see what the occupancy needs.",
    "edge": "fewer, longer blocks have fewer of them: a larger block_m, if the grid still fills the GPU.",
    "tail": "another block_m changes the number of waves; many small blocks end more evenly.",
}
"""What would make each term smaller."""

LEVEL = 0.95
"""Terms that reach this share of the largest one bind together with it."""


def explain(analysis: Analysis) -> str:
    """What binds this config, one statement a line, then its occupancy."""
    lines = [
        *_time(analysis),
        *_measured(analysis),
        *_exponentials(analysis),
        _tensor_cores(analysis),
        *_memory(analysis),
        *_on_chip(analysis),
        explain_occupancy(analysis.occupied, alternatives=analysis.alternatives, waves=analysis.waves),
    ]
    return "\n".join(lines)


def _time(analysis: Analysis) -> list[str]:
    found = analysis.breakdown
    if found is None:
        missing = ", ".join(analysis.missing_rates)
        return [f"No time is predicted: {missing} of {analysis.device.name} is unknown."] if missing else []
    times = {name: getattr(found, f"{name}_us") for name in TERMS}
    largest = max(times.values())
    binding = [name for name, time_us in times.items() if time_us >= LEVEL * largest]
    named = " and ".join(f"{name} ({TERMS[name]})" for name in binding)
    takes = "each takes" if len(binding) > 1 else "it takes"
    rate = analysis.shape.flops / found.total_us / 1e6
    return [
        f"Predicted {found.total_us:,.1f} µs, {rate:.0f} TFLOP/s. Bound by {named}: alone {takes} {largest:,.1f} µs, "
        f"{100 * largest / found.total_us:.0f} % of the time; the rest is what "
        "does not overlap.",
        *(f"To lift {name}: {LIFTS[name]}" for name in binding),
    ]


def _measured(analysis: Analysis) -> list[str]:
    error = analysis.model_error
    if analysis.measured_us is None:
        return ["Nobody measured this config for this shape on this device."]
    if error is None:
        return [f"Measured {analysis.measured_us:,.1f} µs."]
    return [
        f"Measured {analysis.measured_us:,.1f} µs: the model is {100 * abs(error):.1f} % "
        f"{'above' if error >= 0 else 'below'} it."
    ]


def _exponentials(analysis: Analysis) -> list[str]:
    if analysis.breakdown is None:
        return []
    ratio = exp_over_products(analysis.breakdown)
    return [f"Exponentials take {ratio:.2f} times as long as the matrix products, on units of their own."]


def _tensor_cores(analysis: Analysis) -> str:
    used, newest = analysis.occupied.resources.tensor_cores, analysis.device.limits.mma
    if used == "none":
        why = "Triton uses none below compute capability 8.0" if newest == "none" else f"this GPU has {newest}"
        return f"Matrix products run without tensor cores, by plain multiply-adds; {why}."
    if used == newest:
        return f"Matrix products run on tensor cores ({used})."
    return (
        f"Matrix products run on tensor cores by an older instruction, {used} where the GPU has {newest}, which "
        f"reaches about {100 * OLDER_MMA_SHARE:.0f} % of the rate."
    )


def _memory(analysis: Analysis) -> list[str]:
    lines = [
        f"A block performs {analysis.block_intensity:.4g} FLOP for every byte of keys and values that it reads, set by "
        "block_m alone."
    ]
    line = analysis.rooflines.get("v2_perfect_l2")
    if line is not None:
        bound = "memory" if line.bound_by_memory else "arithmetic"
        lines.append(
            f"With every tensor read once the problem has {line.intensity:,.0f} FLOP for every byte of device memory, "
            f"and below {line.ridge_point:,.0f} memory is the ceiling. So {bound} bounds it: at least "
            f"{line.least_us:,.1f} µs."
        )
    return lines + _cache(analysis) + ([analysis.standard_problem] if analysis.standard_problem else [])


def _cache(analysis: Analysis) -> list[str]:
    """Device memory delivers so many bytes in the measured time; the others that v2 reads must have come from L2."""
    line, time_us = analysis.rooflines.get("v2"), analysis.measured_us
    if line is None or time_us is None:
        return []
    memory_us = line.hbm_bytes / (line.memory_gbs * 1e3)
    if time_us >= memory_us:
        return []
    return [
        f"If every query tile read its keys from device memory, that alone would take {memory_us:,.1f} µs: at least "
        f"{100 * (1 - time_us / memory_us):.0f} % of these bytes came from L2, which the theorem does not know."
    ]


def _on_chip(analysis: Analysis) -> list[str]:
    budget, resources = analysis.budget, analysis.occupied.resources
    if budget is None:
        return []
    other = resources.shared_bytes - budget.shared_bytes
    beside = f", {other:,} B beside the tiles (barriers, conversions of layouts)" if other > 0 else ""
    return [
        f"Tiles fill at least {budget.least_registers} registers a thread (the code has {resources.registers}) and "
        f"{budget.shared_bytes:,} B of shared memory (the code has {resources.shared_bytes:,}{beside})."
    ]
