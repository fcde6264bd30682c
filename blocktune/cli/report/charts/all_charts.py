"""Every chart of the page, by the name under which the page looks it up."""

import functools

from blocktune.cli.report.charts import counters, explorer, heat_maps, search, shapes, times
from blocktune.cli.report.charts.style import Spec

STRATEGY = "guided"
"""Whose band the replayed searches show at first: the default of `tune run`."""


@functools.cache
def all_charts() -> dict[str, Spec]:
    """Return the specs by name, made once: Altair checks each of them against its schema."""
    curves = {f"curve-{resource}": explorer.curve(resource) for resource in explorer.RESOURCES}
    maps = {f"heat-{name}": heat_maps.heat_map(measure) for name, measure in heat_maps.MEASURES.items()}
    fleet = {f"shapes-{measure}": shapes.shape_map(measure) for measure in (*shapes.RATIOS, "rung", "misses")}
    return (
        curves
        | maps
        | fleet
        | {
            "lanes": times.lanes(),
            "roofline": times.roofline(),
            "counter-ratios": counters.counter_ratios(),
            "stall-reasons": counters.stall_reasons(),
            "progress-trial": search.progress("trial"),
            "progress-seconds": search.progress("seconds"),
            "strategies": search.strategies(STRATEGY),
            "importance": search.importance(),
            "finalists": search.finalists(),
            "states": search.states(),
            "contenders": shapes.contenders(),
            "ladder": shapes.ladder(),
            "block-sizes": shapes.block_sizes(),
            "differences": shapes.differences(),
        }
    )
