"""An analysis in words: what binds, what would lift it, and how much the model can be trusted here."""

from collections.abc import Iterable, Mapping

from blocktune.kernels.values.shape import Direction
from blocktune.tuner.cost.analysis import Analysis
from blocktune.tuner.cost.iterations import OLDER_MMA_SHARE
from blocktune.tuner.cost.roofline import Roofline, exp_over_products
from blocktune.tuner.cost.term_texts import terms_of
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from blocktune.tuner.occupancy.text import text_of_occupancy

LEVEL = 0.95
"""Terms that reach this share of the largest one bind together with it."""

UNEXPLAINED = (
    "The model does not explain this config: it is too far from the measurement to say what binds it or what would "
    "lift that. The facts of its code and its bytes are counted."
)

UNCHECKED = "nothing like this was measured on this device"


def text_of_analysis(analysis: Analysis) -> str:
    """Return what binds this config, one statement per line, then its occupancy."""
    lines = [
        *_time(analysis),
        *_measured(analysis),
        *_exponentials(analysis),
        _tensor_cores(analysis),
        *_memory(analysis),
        *_on_chip(analysis),
        *_bank_conflicts(analysis),
        text_of_occupancy(analysis.occupied, alternatives=analysis.alternatives, waves=analysis.waves),
    ]
    return "\n".join(lines)


def _time(analysis: Analysis) -> list[str]:
    found = analysis.breakdown
    if found is None:
        missing = ", ".join(analysis.missing_rates)
        return [f"No time is predicted: {missing} of {analysis.device.name} is unknown."] if missing else []
    rate = analysis.flops / found.total_us / 1e6
    predicted = f"Predicted {analysis.predicted_text}; {rate:.0f} TFLOP/s."
    if not analysis.is_explained:
        return [predicted]
    binding = binding_terms(analysis)
    return [
        f"{predicted} {_term_times(analysis, binding)}",
        *_advice(analysis, binding),
    ]


def _advice(analysis: Analysis, binding: Iterable[str]) -> list[str]:
    if analysis.gives_advice:
        return [f"To reduce {name}: {analysis.lifts[name]}" for name in binding]
    return [f"No advice is given, since {UNCHECKED if analysis.band is None else analysis.band.doubt}."]


def binding_terms(analysis: Analysis) -> dict[str, float]:
    """Return the largest term and those that are level with it, with the time that each takes alone."""
    times = {name: getattr(analysis.breakdown, f"{name}_us") for name in terms_of(analysis.shape)}
    largest = max(times.values())
    return {name: time_us for name, time_us in times.items() if time_us >= LEVEL * largest}


def _term_times(analysis: Analysis, binding: Mapping[str, float]) -> str:
    """Return each term with its own time. Times of units that work at once do not add up, so that none is called a
    share."""
    terms = terms_of(analysis.shape)
    named = " and ".join(f"{name} ({terms[name]}), alone {time_us:,.1f} µs" for name, time_us in binding.items())
    return f"Bound by {named}; units overlap, so that such times do not add up."


def _measured(analysis: Analysis) -> list[str]:
    error = analysis.model_error
    if analysis.measured_us is None:
        return ["No measurement of this config for this shape on this device is known."]
    if error is None:
        return [f"Measured {analysis.measured_us:,.1f} µs."]
    line = analysis.rooflines[analysis.once]
    return [
        f"Measured {analysis.measured_us:,.1f} µs: the model is {100 * abs(error):.1f} % "
        f"{'above' if error >= 0 else 'below'} it.",
        *([] if analysis.is_explained else [UNEXPLAINED]),
        *([_bandwidth(line, analysis.measured_us)] if line.bound_by_memory else []),
    ]


def _bandwidth(line: Roofline, measured_us: float) -> str:
    """Return the rate at which a problem that memory bounds moves its bytes."""
    reached = line.hbm_bytes / measured_us / 1e3
    return (
        f"In that time it moves {line.hbm_bytes / 1e6:,.1f} MB at least, {reached:,.0f} GB/s: "
        f"{100 * reached / line.memory_gbs:.0f} % of what the device's memory delivers."
    )


def _exponentials(analysis: Analysis) -> list[str]:
    if analysis.breakdown is None or not analysis.is_explained:
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
    lines = [_intensity(analysis)]
    line = analysis.rooflines.get(analysis.once)
    if line is not None:
        bound = "memory" if line.bound_by_memory else "arithmetic"
        lines.append(
            f"With {_premise(analysis)} the problem has {line.intensity:,.0f} FLOP for every byte of device memory, "
            f"and below {line.ridge_point:,.0f} memory is the ceiling. So {bound} bounds it: at least "
            f"{line.least_us:,.1f} µs."
        )
    lines += [_distance(analysis), *_passes(analysis), *_density(analysis), *_cache(analysis)]
    return lines + ([analysis.standard_problem] if analysis.standard_problem else [])


def _distance(analysis: Analysis) -> str:
    """Return how far the config's bytes are from the fewest that any algorithm moves."""
    least, counts = analysis.least_bytes, (analysis.traffic[analysis.once], analysis.traffic[analysis.uncached])
    once, uncached = (f"{count.total_bytes / least:,.3g}" for count in counts)
    times = f"{once} times" if once == uncached else f"{once} to {uncached} times"
    return (
        f"Inputs and outputs alone are {least / 1e6:,.1f} MB, which every algorithm moves (Proposition 3 of the "
        f"FlashAttention paper); this config moves {times} as much, by how much L2 keeps."
    )


def _premise(analysis: Analysis) -> str:
    """Say what follows from the fewest bytes that the kernel is counted with."""
    if analysis.traffic[analysis.once].total_bytes == analysis.traffic[analysis.uncached].total_bytes:
        return "this traffic, of which blocks share nothing,"
    return "each launch reading every tensor once" if analysis.passes else "every tensor read once"


def _intensity(analysis: Analysis) -> str:
    if analysis.block_intensity is None:
        each = analysis.flops / analysis.traffic[analysis.uncached].total_bytes
        return (
            f"All blocks together perform {each:.4g} FLOP for every byte that they read, write or add, wherever it "
            "comes from: set by the rows that a block owns, not by those it walks."
        )
    return (
        f"A block performs {analysis.block_intensity:.4g} FLOP for every byte of keys and values that it reads, set by "
        "block_m alone."
    )


def _passes(analysis: Analysis) -> list[str]:
    """Return the launches of a kernel that has several, by the bytes that each cannot avoid."""
    if not analysis.passes:
        return []
    largest = max(analysis.passes, key=lambda one: one.total_bytes)
    named = ", ".join(f"{one.name} {one.total_bytes / 1e6:,.1f} MB" for one in analysis.passes)
    text = f"Its launches move at least: {named}."
    line = analysis.rooflines.get(analysis.once)
    if line is not None:
        others_us = (line.hbm_bytes - largest.total_bytes) / (line.memory_gbs * 1e3)
        text += f" Those besides {largest.name} take {others_us:,.1f} µs of device memory."
    return [text]


def _density(analysis: Analysis) -> list[str]:
    if analysis.density == 1.0:
        return []
    return [
        f"All of this is for a block mask of density {analysis.density:g}, as shapes are tuned with: time and bytes "
        "follow the density of the mask at hand."
    ]


def _cache(analysis: Analysis) -> list[str]:
    """Return what share of the bytes came from L2, as device memory could not deliver it in the measured time."""
    line, time_us = analysis.rooflines.get(analysis.uncached), analysis.measured_us
    if line is None or time_us is None:
        return []
    memory_us = line.hbm_bytes / (line.memory_gbs * 1e3)
    if time_us >= memory_us:
        return []
    who = "key tile read its queries" if analysis.shape.direction is Direction.BACKWARD else "query tile read its keys"
    return [
        f"If every {who} from device memory, that alone would take {memory_us:,.1f} µs: at least "
        f"{100 * (1 - time_us / memory_us):.0f} % of these bytes came from L2, which the theorem does not know."
    ]


def _on_chip(analysis: Analysis) -> list[str]:
    on_chip, resources = analysis.on_chip, analysis.occupied.resources
    if on_chip is None:
        return []
    other = resources.shared_bytes - on_chip.shared_bytes
    beside = f", {other:,} B besides the tiles (barriers, conversions of layouts)" if other > 0 else ""
    has = f"the code has {resources.registers}"
    if on_chip.num_warps < resources.num_warps:
        has += ", and warps that copy leave most of theirs to those that compute"
    return [
        f"Tiles fill at least {on_chip.least_registers} registers per thread ({has}) and "
        f"{on_chip.shared_bytes:,} B of shared memory (the code has {resources.shared_bytes:,}{beside})."
    ]


def _bank_conflicts(analysis: Analysis) -> list[str]:
    """Return how the loop of the compiled code reads shared memory, if it was counted."""
    found = analysis.shared
    return [] if found is None else [bank_conflict_text(found, analysis.occupied.resources.tensor_cores)]


def bank_conflict_text(found: SharedAccesses, tensor_cores: str) -> str:
    """Return how the loop of compiled code reads shared memory; tensor_cores: the instruction of its products."""
    if not found.loads:
        through = f", but through descriptors of {tensor_cores}" if tensor_cores in ("wgmma", "tcgen05") else ""
        return f"The loop of the products does not read shared memory by loads{through}: no bank conflicts to count."
    counted = (
        f"In an iteration of the loop a warp loads from shared memory {found.loads} times, which takes "
        f"{found.load_wavefronts:,} wavefronts, {found.ways:.1f} per load"
    )
    if not found.load_excess:
        return f"{counted}: no bank conflicts."
    return (
        f"{counted}, which a profiler calls a {found.ways:.1f}-way bank conflict: {found.load_excess:,} of them, "
        f"{100 * found.conflict_share:.1f} %, are more than the widths of the loads need."
    )
