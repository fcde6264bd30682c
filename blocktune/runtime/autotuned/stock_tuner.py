"""Triton's own tuner: how it measures a call, and where programs look for what was chosen."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from blocktune.kernels.files.variables import PRINT
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung

if TYPE_CHECKING:
    import triton
    from triton.runtime.autotuner import Autotuner

    from blocktune.runtime.autotuned.call import AutotunedCall
    from blocktune.runtime.autotuned.fallback import KernelExplanation

StockKey = tuple[object, ...]
Timings = Mapping["triton.Config", Sequence[float]]
"""Of each config in milliseconds: the median, and the bounds of what is usual."""


def stock_key(tuner: "Autotuner", args: Sequence[object], kwargs: Mapping[str, object]) -> StockKey:
    """Return the key that Triton's tuner keeps the winner of a call under."""
    names = tuner.arg_names
    given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in kwargs if name in names}}
    types = [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]
    return (*(given[name] for name in tuner.keys if name in given), *types)


def stock_choice(
    tuner: "Autotuner", configs: "Sequence[triton.Config]", args: Sequence[object], kwargs: Mapping[str, object]
) -> "tuple[KernelExplanation, Timings]":
    """Return the choice that Triton's tuner measures, with its times; nothing but this process keeps it.

    Raises:
        Exception: what a launch raises.
    """
    started = time.monotonic()
    named = tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        timings = {config: tuner._bench(*args, config=config, **kwargs) for config in configs}
    finally:
        tuner.nargs = None
    winner = min(timings, key=timings.__getitem__)
    tuner.pre_hook({**named, **kwargs, **winner.all_kwargs()}, reset_only=True)
    why: KernelExplanation = Explanation(
        rung=Rung.DEFAULT,
        reason="measured by Triton's own tuner",
        launched=winner,
        tuned=True,
        seconds=time.monotonic() - started,
    )
    return why, timings


def median_ms(timing: float | Sequence[float]) -> float:
    """Return the time that counts of what a benchmark returns."""
    return timing[0] if isinstance(timing, Sequence) else timing


def timings_of(call: "AutotunedCall", choice: "KernelExplanation") -> Timings:
    """Return the times of a choice as Triton's tuner has them; configs that failed take for ever."""
    known = {} if choice.time_us is None or choice.config is None else {choice.config: choice.time_us}
    times_us = choice.times_us or known
    dropped = choice.dropped or {}
    failed = {launched: [float("inf")] * 3 for config, launched in call.configs.items() if config.label in dropped}
    return failed | {call.launched(config): [time_us / 1e3] * 3 for config, time_us in times_us.items()}


def tell_choice(tuner: "Autotuner", key: StockKey, label: str, choice: "KernelExplanation", timings: Timings) -> None:
    """Say what was chosen where Triton would: to its listener, and on standard output where it, or BLOCKTUNE_PRINT, is
    to print."""
    from triton import knobs

    from blocktune.runtime.autotuned.call import jitted_function
    from blocktune.runtime.autotuned.race_line import race_line

    listener = getattr(knobs.autotuning, "listener", None)
    if listener is not None:
        listener(
            fn=jitted_function(tuner.fn),
            key=key,
            best_config=choice.launched,
            configs_timings=dict(timings),
            duration=choice.seconds if choice.tuned else None,
            cache_hit=not choice.tuned,
        )
    if knobs.autotuning.print and choice.tuned:
        sys.stdout.write(
            f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {label},\n"
            f"finished after {choice.seconds:.2f}s,\nbest config selected: {choice.launched};\n"
        )
    if choice.tuned and (knobs.autotuning.print or PRINT.is_on()):
        sys.stdout.write(f"blocktune: {race_line(label, choice)}\n")
