"""The target of `tune run`: a shape, or a call of an autotuned kernel."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias, Union

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.compile_server.farm import CompileFarm
    from blocktune.tuner.drop_in.request import LaunchRequest
    from blocktune.tuner.measure.runner import GpuRunner
    from blocktune.tuner.search.report import OnProgress, TuningReport

Target: TypeAlias = Union["AttentionShape", "LaunchRequest"]


def tune_target(
    target: Target,
    search: dict[str, Any],
    store: "ResultStore",
    show: "OnProgress",
    compiler: "CompileFarm",
    runner: "GpuRunner | None" = None,
) -> "TuningReport":
    """Tune a shape or a call.

    Args:
        target: what is tuned.
        search: further arguments of `tune`.
        store: where results are kept.
        show: called with where the run stands.
        compiler: compiles configs of shapes; calls have a compiler of their own.
        runner: measures one shape after the other; None makes one.
    """
    from blocktune.tuner.drop_in.request import LaunchRequest
    from blocktune.tuner.search.arguments import SearchOptions
    from blocktune.tuner.search.tune import tune
    from blocktune.tuner.search.tune_launch import tune_launch

    if isinstance(target, LaunchRequest):
        options = SearchOptions(**{field.name: search[field.name] for field in fields(SearchOptions)})
        with target.open_call() as call:
            return tune_launch(call, search["device"], store, options, show)
    return tune(target, store=store, on_progress=show, compiler=compiler, runner=runner, **search)
