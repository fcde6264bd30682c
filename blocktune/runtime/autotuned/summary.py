"""A summary of the tuner's work in this process: in words, at the exit where BLOCKTUNE_SUMMARY is 1, or by a call, and
in counts, which `tune kernels` shows."""

import atexit
import logging
import os
import sys
from collections.abc import Iterable, Iterator

from blocktune.kernels.files.variables import SUMMARY
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.kernels.values.text import counted
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.kernel import TunedKernel, kernels
from blocktune.runtime.autotuned.launches import append_launches, launches_path, read_launches

logger = logging.getLogger("blocktune")

MAX_REASON = 200
"""Characters of why a config failed."""

_EXPECTED = ("infeasible", "wrong_result")
"""How configs end that are left out on purpose."""


def summary() -> str:
    """Return a line for each kernel that this process launched, its configs that failed, and a line for all of them."""
    launched = sorted((kernel for kernel in kernels if kernel.table.calls), key=lambda kernel: kernel.name)
    lines = [line for kernel in launched for line in (_line(kernel), *_failures(kernel))]
    misses = sum(kernel.misses for kernel in launched)
    known = [choice for kernel in launched for choice in kernel.choices.values() if not choice.tuned and choice.time_us]
    seconds = sum(kernel.seconds for kernel in launched)
    others = sum(any(_differs(kernel, choice) for choice in kernel.choices.values()) for kernel in launched)
    autotuned = counted(len(launched), "autotuned kernel")
    kinds = counted(misses, "new kind of calls", "new kinds of calls")
    other = counted(others, "kernel")
    launches = _launches(sum(kernel.table.calls for kernel in launched))
    lines.append(
        f"blocktune: {autotuned}, {launches}, {kinds} in {seconds:.1f} s, "
        f"{len(known)} of them known before{_spared(launched)}; {other} with another winner than the first config of "
        f"the list{_saved(launched)}."
    )
    return "\n".join(lines)


def tell_at_exit() -> None:
    """Keep the counts of this process when it ends, and write the summary to standard error if the environment says so.
    A forked child, which has its parent's counts, does neither."""
    process, writes = os.getpid(), SUMMARY.is_on()

    def tell() -> None:
        if os.getpid() != process:
            return
        if writes:
            sys.stderr.write(summary() + "\n")
        keep_launches()

    atexit.register(tell)


def keep_launches() -> None:
    """Add what this process has launched to the counts of all; a place that is not known or cannot be written costs
    these counts."""
    counts = {kind: launches for kernel in kernels for kind, launches in kernel.table.launches.items() if launches}
    try:
        path = launches_path()
        if path is not None and counts:
            append_launches(path, counts)
    except Exception as error:  # whatever is wrong with a place or a disk: the process ends
        logger.info("Launches are not counted: %s", error)


def _line(kernel: TunedKernel) -> str:
    choices = list(kernel.choices.values())
    dropped = sum(len(choice.dropped or {}) for choice in choices)
    others = sum(_differs(kernel, choice) for choice in choices)
    words = [
        _launches(kernel.table.calls),
        counted(len(choices), "kind of calls", "kinds of calls"),
        f"{sum(choice.tuned for choice in choices)} tuned here in {kernel.seconds:.1f} s",
        f"{others} not with the list's first config",
    ]
    if dropped:
        words.append(f"{counted(dropped, 'config')} dropped or failed")
    return f"{kernel.name}: {', '.join(words)}{_gain(choices)}"


def _launches(count: int) -> str:
    return counted(count, "launch", "launches")


def _failures(kernel: TunedKernel) -> Iterator[str]:
    """Yield a line for each config of a kernel that crashed, hung or did not compile."""
    for choice in kernel.choices.values():
        for label, reason in (choice.dropped or {}).items():
            if not reason.startswith(_EXPECTED):
                yield f"  {label} failed: {reason[:MAX_REASON]}"


def _spared(launched: Iterable[TunedKernel]) -> str:
    """Return the seconds that earlier processes measured what this one knew, as far as they are counted."""
    try:
        path = launches_path()
        kept = {} if path is None else read_launches(path)
    except (StoreError, UsageError) as error:
        logger.info("%s", error)
        return ""
    known = (kind for kernel in launched for kind, launches in kernel.table.launches.items() if not launches.misses)
    before = [kept[kind] for kind in known if kind in kept and kept[kind].misses]
    seconds = sum(launches.seconds / launches.misses for launches in before)
    return f", which saved {seconds:.1f} s of measuring" if seconds else ""


def _saved(launched: Iterable[TunedKernel]) -> str:
    """Return the GPU time that was saved, where the list's first configs were timed in this process."""
    saved_us = sum(served.saved_us for kernel in launched for served in kernel.table.served.values())
    return f", which saved {saved_us / 1e6:.3g} s of the GPU's time" if saved_us > 0 else ""


def _differs(kernel: TunedKernel, choice: KernelExplanation) -> bool:
    return bool(kernel.tuner.configs) and choice.launched != kernel.tuner.configs[0]


def _gain(choices: Iterable[KernelExplanation]) -> str:
    """Return how much faster than the list's first config the winners of this process are, where both were timed."""
    ratios = [
        choice.default_time_us / choice.time_us for choice in choices if choice.default_time_us and choice.time_us
    ]
    return f", up to {max(ratios):.2f} times as fast as it" if ratios else ""
