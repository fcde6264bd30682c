"""The line on how a race of an autotuned kernel's configs ended: winner, spread, spills, and what was dropped and
why."""

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blocktune.runtime.autotuned.fallback import KernelExplanation

MAX_REASON = 100
"""Characters of why configs were dropped, of which one example is shown for each kind."""


def race_line(problem: str, choice: "KernelExplanation") -> str:
    """Return the line on a choice that was measured."""
    time = "" if choice.time_us is None else f", {choice.time_us:.1f} us"
    spread = "" if choice.spread is None else f" +- {100 * choice.spread:.1f} %"
    words = [f"{choice.label} for {problem}{time}{spread}{_gain(choice)}"]
    if choice.spill_bytes is not None:
        words.append(f"spills {choice.spill_bytes} B a thread" if choice.spill_bytes else "no spills")
    words.append(f"{len(choice.times_us or {})} raced in {choice.seconds:.1f} s")
    words.append(_dropped(choice))
    return "; ".join(words)


def _gain(choice: "KernelExplanation") -> str:
    """Return how much faster than the list's first config the winner is, where both were timed."""
    if not choice.time_us or not choice.default_time_us:
        return ""
    return f", {choice.default_time_us / choice.time_us:.2f} times as fast as the first config"


def _dropped(choice: "KernelExplanation") -> str:
    """Return how many configs were dropped or failed, and an example of each kind of reason."""
    examples = defaultdict[str, list[str]](list)
    for label, reason in (choice.dropped or {}).items():
        outcome, _, words = reason.partition(": ")
        examples[outcome].append(f"{label}: {' '.join(words.split())}")
    kinds = [f"{len(found)} {outcome} ({found[0][:MAX_REASON]})" for outcome, found in examples.items()]
    return f"{len(choice.dropped or {})} dropped" + (f": {', '.join(kinds)}" if kinds else "")
