"""The explanation of what serves a call, and why: of attention, and of a launch of an autotuned kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.text import html_table
from blocktune.runtime.selection.ladder import Candidate, Rejection, Rung
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.tuned_config import ConfigT, ProblemT

if TYPE_CHECKING:
    import triton

    from blocktune.runtime.selection.expectation import Expectation

SHOWN_RIVALS = 5
"""Rivals of an expected config in a text; JSON has all of them."""


_HOW = {
    Reuse.EXACT: "on this device",
    Reuse.OTHER_DRIVER: "on this device with another driver or power limit",
    Reuse.OTHER_COMPILER: "on this device with another triton or ptxas",
    Reuse.OTHER_SOURCE: "on this device with another version of the kernel's source",
    Reuse.SAME_CAPABILITY: "elsewhere, on a device of this compute capability,",
}


def measured_reason(candidate: Candidate[Any, Any], noun: str) -> str:
    """Return how a candidate was measured, and for what: a `noun` such as "shape", or the nearest one."""
    other = candidate.tuned_for if candidate.rung is Rung.NEAREST else None
    subject = f"this {noun}" if other is None else other.label
    agreed = candidate.origin is Origin.COMMUNITY and candidate.reuse is Reuse.OTHER_COMPILER
    how = "by several machines with this kind of GPU" if agreed else _HOW[candidate.reuse or Reuse.EXACT]
    return f"measured {how} for {subject}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Generic[ProblemT, ConfigT]):
    """Which source of the ladder serves a call, and why no higher one; of attention unless the types say otherwise.

    shape: None where the tensors are not an attention problem that we know.
    tuned_for: what the config was tuned for.
    time_us: the time measured there.
    passed_over: the reasons of higher sources.
    compared: what the config and its rivals are expected to take, where that decided.
    warnings: what was wrong with the sources.
    device: the `DeviceSpec.key` of the device whose configs were looked up; None where no lookup was made.

    Only a launch of an autotuned kernel has the following.

    launched: what Triton launches with.
    default_time_us: of the list's first config, if it was timed.
    tuned: whether this process measured it, which took `seconds`.
    dropped: configs that were not measured or failed, by their label, with the reason.
    times_us: of the configs that were raced.
    spread: half of what the middle half of the winner's rounds spans, over their median.
    spill_bytes: what a thread of the winner spills.
    rates: what was moved and computed a second, in words, as far as it is known, or that a search beyond the list had
        to do without it.
    """

    rung: Rung
    reason: str
    shape: ProblemT | None = None
    config: ConfigT | None = None
    origin: Origin | None = None
    tuned_for: ProblemT | None = None
    time_us: float | None = None
    passed_over: tuple[Rejection, ...] = ()
    compared: "tuple[Expectation, ...]" = ()
    warnings: tuple[str, ...] = ()
    device: str | None = None
    launched: "triton.Config | None" = None
    default_time_us: float | None = None
    tuned: bool = False
    seconds: float = 0.0
    dropped: Mapping[str, str] | None = None
    times_us: Mapping[ConfigT, float] | None = None
    rates: str = ""
    spread: float | None = None
    spill_bytes: int | None = None

    @property
    def is_measured_here(self) -> bool:
        """Whether the config is a measurement of this shape on this device with this code; drivers may differ."""
        return self.rung in (Rung.EXACT, Rung.OTHER_DRIVER)

    @property
    def label(self) -> str:
        """The config in words."""
        return self.config.label if self.config else str(self.launched or "PyTorch")

    @property
    def headline(self) -> str:
        """The answer in one line."""
        config = f"{self.label}, " if self.config or self.launched else ""
        return f"{self.subject}: {self.rung}: {config}{self.reason}"

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  {self.rates}"] if self.rates else []
        lines += [f"  passed over {rejection}" for rejection in self.passed_over]
        lines += [f"  compared with {rival.label}" for rival in self.compared[1 : SHOWN_RIVALS + 1]]
        lines += [f"  dropped {label}: {reason}" for label, reason in (self.dropped or {}).items()]
        return "\n".join(lines + [f"  warning: {warning}" for warning in self.warnings])

    def __repr__(self) -> str:
        """Return the explanation in words, as `print` shows it."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return a table for a notebook: what serves the call, then why each higher source does not."""
        rows = {str(self.rung): f"{self.label}: {self.reason}"}
        rows |= {str(rejection.rung): rejection.reason for rejection in self.passed_over}
        rows |= {f"rival {number}": rival.label for number, rival in enumerate(self.compared[1 : SHOWN_RIVALS + 1], 1)}
        rows |= {f"dropped {label}": reason for label, reason in (self.dropped or {}).items()}
        rows |= {"warning": "; ".join(self.warnings)} if self.warnings else {}
        return html_table(self.subject, rows, bold={str(self.rung)})

    @property
    def subject(self) -> str:
        """The call in words."""
        return self.shape.label if self.shape else "this call"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the field names of this class; those of a launch where it was tuned."""
        return {
            "rung": str(self.rung),
            "reason": self.reason,
            "shape": self.shape.to_json() if self.shape else None,
            "config": self.config.to_json() if self.config else None,
            "origin": str(self.origin) if self.origin else None,
            "tuned_for": self.tuned_for.to_json() if self.tuned_for else None,
            "time_us": self.time_us,
            "passed_over": [
                {"rung": str(rejection.rung), "reason": rejection.reason} for rejection in self.passed_over
            ],
            "compared": [one.to_json() for one in self.compared],
            "warnings": list(self.warnings),
            "device": self.device,
        } | (self._tuning_json() if self.tuned else {})

    def _tuning_json(self) -> dict[str, Any]:
        times_us = self.times_us or {}
        return {
            "default_time_us": self.default_time_us,
            "seconds": self.seconds,
            "dropped": dict(self.dropped or {}),
            "times_us": {config.label: time_us for config, time_us in times_us.items()},
            "rates": self.rates,
            "spread": self.spread,
            "spill_bytes": self.spill_bytes,
        }
