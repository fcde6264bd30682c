"""Stock `@triton.autotune` on the same space: its winner, and how long it takes to find it.

The decorator gets a `triton.Config` for every config that compiles, over the same jitted functions. Two things are done
for it that it does not do itself, since it would otherwise end without a result: configs that do not compile are left
out, because a compiler that aborts takes the process with it; and a config that fails at run time counts as infinitely
slow. The configs are compiled ahead in parallel, and the compile times that stock autotune would have spent one after
another are added up next to its wall time.
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile_server.background import Compiler

KEY = ["seqlen_q", "seqlen_k"]
"""The arguments whose change makes stock autotune tune again."""

Bind = Callable[[KernelConfig, AttentionShape], Any]
DoBench = Callable[..., list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StockTuning:
    """How stock autotune did. winner: of all kernels, by its own timings, one of which is time_us.

    configs: how many it tried, of which `failed` did not run. left_out: feasible ones that do not compile. seconds: its
    wall time here, in which it compiled `compiled` configs itself and found the others in Triton's cache.
    compile_seconds: what compiling all of them takes one after another.
    """

    winner: KernelConfig
    time_us: float | None
    configs: int
    failed: int
    left_out: int
    compiled: int
    seconds: float
    compile_seconds: float

    @property
    def cold_seconds(self) -> float:
        """Wall time with an empty cache, estimated: the compile times of what came from the cache are added."""
        return self.seconds + self.compile_seconds * max(0, self.configs - self.compiled) / self.configs

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"winner": self.winner.to_json(), "cold_seconds": self.cold_seconds}


def run_stock_autotune(
    configs: Sequence[KernelConfig],
    shape: AttentionShape,
    cc: tuple[int, int],
    *,
    compiler: Compiler,
    bind: Bind,
    arguments: tuple[Any, ...],
    synchronize: Callable[[], None],
    do_bench: DoBench | None = None,
) -> StockTuning:
    """Tune every kernel among the configs by `triton.autotune` and names the fastest of their winners.

    Args:
        configs: the feasible ones.
        shape: what is computed.
        cc: compute capability to compile for.
        compiler: compiles ahead.
        bind: gives the `TritonLaunch` of a config.
        arguments: q, k, v, out, lse and scale of the launches.
        synchronize: waits for the GPU.
        do_bench: Triton's benchmark function; None is stock `triton.testing.do_bench`.

    Raises:
        NoFeasibleConfigError: no config compiles.
    """
    compiled_ahead = [compiler.submit(config.kernel, config, shape, cc) for config in configs]
    results = [future.result() for future in compiled_ahead]
    able = [result.config for result in results if result.outcome is Outcome.OK]
    if not able:
        raise NoFeasibleConfigError(
            f"No config compiles for {shape.label}, of {len(configs)} tried. For example: "
            f"{results[0].error if results else 'no config was given'}. Leave stock autotune out."
        )
    failures: list[str] = []
    started = time.perf_counter()
    with _counted_compiles() as compiles:
        winners = []
        for kernel in dict.fromkeys(config.kernel for config in able):
            own = [config for config in able if config.kernel == kernel]
            winners.append(_tune_kernel(own, shape, bind, arguments, _tolerant(do_bench, failures)))
            synchronize()
    seconds = time.perf_counter() - started
    # one without a rival was not timed: it loses to those that were, but not to those that failed
    winner, time_us = min(winners, key=lambda pair: sys.float_info.max if pair[1] is None else pair[1])
    if time_us == math.inf:
        raise NoFeasibleConfigError(
            f"No config runs for {shape.label}, of {len(able)} that compile. For example: {failures[0]}. Leave stock "
            "autotune out."
        )
    return StockTuning(
        winner=winner,
        time_us=time_us,
        configs=len(able),
        failed=len(failures),
        left_out=len(configs) - len(able),
        compiled=len(compiles),
        seconds=seconds,
        compile_seconds=sum(result.seconds for result in results if result.outcome is Outcome.OK),
    )


def _tune_kernel(
    configs: Sequence[KernelConfig], shape: AttentionShape, bind: Bind, arguments: tuple[Any, ...], do_bench: DoBench
) -> tuple[KernelConfig, float | None]:
    """Return the winner among configs of one kernel and its time in microseconds, None where it had no rival."""
    import triton

    q, k, v, out, _, _ = arguments
    launches = {config: bind(config, shape) for config in configs}
    function = launches[configs[0]].function
    names = function.arg_names
    leading = {config: launch.described(*arguments) for config, launch in launches.items()}
    trailing_names = names[len(leading[configs[0]]) :]
    trailing = {
        config: dict(zip(trailing_names, launch.trailing(q, k, v, out), strict=True))
        for config, launch in launches.items()
    }
    tuned = [name for name in trailing_names if len({values[name] for values in trailing.values()}) > 1]
    choices = {
        config: triton.Config(
            {name: trailing[config][name] for name in tuned},
            **launch.options,
            pre_hook=_set_descriptor_blocks(dict(zip(names, leading[config], strict=False))),
        )
        for config, launch in launches.items()
    }
    grids = {tuple(trailing[config][name] for name in tuned): launch.grid for config, launch in launches.items()}
    fixed = dict(zip(names, leading[configs[0]], strict=False))
    fixed |= {name: value for name, value in trailing[configs[0]].items() if name not in tuned}
    tuner = triton.autotune(configs=list(choices.values()), key=KEY, do_bench=do_bench)(function)
    tuner[lambda meta: grids[tuple(meta[name] for name in tuned)]](**fixed)
    best = tuner.best_config
    winner = next(config for config, choice in choices.items() if choice.all_kwargs() == best.all_kwargs())
    timings = getattr(tuner, "configs_timings", {})
    return winner, 1e3 * timings[best][0] if best in timings else None


def _set_descriptor_blocks(arguments: Mapping[str, Any]) -> Callable[[dict[str, Any]], None] | None:
    """Return a hook that gives the launch's tensor descriptors the block shapes that these have; None without
    descriptors."""
    blocks = {name: value.block_shape for name, value in arguments.items() if hasattr(value, "block_shape")}
    return functools.partial(_set_blocks, blocks) if blocks else None


def _set_blocks(blocks: Mapping[str, list[int]], launch_arguments: dict[str, Any]) -> None:
    for name, block in blocks.items():
        launch_arguments[name].block_shape = block


def _tolerant(do_bench: DoBench | None, failures: list[str]) -> DoBench:
    """Return the benchmark function, for which a config that fails is infinitely slow; the error is kept in
    `failures`."""

    def measure(call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        from triton.testing import do_bench as stock

        try:
            return (do_bench or stock)(call, quantiles=quantiles)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
            return [math.inf] * len(quantiles)

    return measure


@contextmanager
def _counted_compiles() -> Iterator[list[str]]:
    """Collect one entry for every kernel that is compiled meanwhile, rather than found in Triton's cache."""
    from triton import knobs

    found: list[str] = []
    before = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(src.name)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before
