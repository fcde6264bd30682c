"""A dispatcher's explanation of what serves a call, and why."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from blocktune.kernels.hardware.catalogue import entry_by_driver_name
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.selection.correction import measured_elsewhere
from blocktune.kernels.selection.expectation import Expectation
from blocktune.kernels.selection.fallback import Candidate, Rejection, Rung
from blocktune.kernels.stored.provenance import Reuse
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import SHORT_DTYPES, AttentionShape, Causal, Direction
from blocktune.kernels.values.text import html_table

SHOWN_RIVALS = 5
"""Rivals of an expected config in a text; JSON has all of them."""

_REASONS = {
    Rung.EXACT: "measured {how} for this shape",
    Rung.OTHER_DRIVER: "measured {how} for this shape",
    Rung.OTHER_COMPILER: "measured {how} for this shape",
    Rung.OTHER_SOURCE: "measured {how} for this shape",
    Rung.SAME_CAPABILITY: "measured {how} for this shape",
    Rung.EXPECTED: "{what}not measured, but expected to take {expected}, the least of {count} configs{elsewhere}: "
    "`tune run {flags}` measures",
    Rung.NEAREST: "measured {how} for {tuned_for}",
    Rung.PREDICTED: "ranked first by the offline model for {tuned_for}",
    Rung.DEFAULT: "the kernel's default, not tuned: `tune run {flags}` looks for a better one",
}

_HOW = {
    Reuse.EXACT: "on this device",
    Reuse.OTHER_DRIVER: "on this device with another driver or power limit",
    Reuse.OTHER_COMPILER: "on this device with another triton or ptxas",
    Reuse.OTHER_SOURCE: "on this device with another version of the kernel's source",
    Reuse.SAME_CAPABILITY: "elsewhere, on a device of this compute capability,",
}


def flags_of(shape: AttentionShape, device: DeviceSpec | None = None) -> str:
    """Return the flags by which commands mean this very shape, for a shell, and a device that is not here. Sizes that
    are as the command has them by default are left out, but for batch and heads."""
    flags = [f"--seq {shape.seqlen_q} --dim {shape.head_dim} --batch {shape.batch} --heads {shape.num_heads}"]
    flags += [f"--kv-heads {shape.num_heads_kv}"] if shape.group_size > 1 else []
    flags += [f"--seq-k {shape.seqlen_k}"] if shape.seqlen_k != shape.seqlen_q or shape.seqlen_q == 1 else []
    flags += [f"--dim-v {shape.head_dim_v}"] if shape.head_dim_v != shape.head_dim else []
    flags += [f"--dtype {SHORT_DTYPES[shape.dtype]}"] if shape.dtype != "bfloat16" else []
    flags += [_CAUSAL_FLAGS[shape.causal]] if shape.causal is not Causal.NONE else []
    flags += [f"--direction {shape.direction}"] if shape.direction is not Direction.FORWARD else []
    flags += [f"--features {shlex.quote(shape.features.label)}"] if shape.features else []
    flags += [f"--device {_device_name(device)}"] if device is not None and device.source == "catalogue" else []
    return " ".join(flags)


def _device_name(device: DeviceSpec) -> str:
    entry = entry_by_driver_name(device.name)
    return shlex.quote(device.name) if entry is None else entry.id


def _elsewhere(device: DeviceSpec | None) -> str:
    """Return words for the other device whose measurements count, where this one has none."""
    other = "" if device is None else measured_elsewhere(device.key)
    return f" by the model and measurements of another device, {other}" if other else ""


_CAUSAL_FLAGS = {Causal.UPPER_LEFT: "--causal", Causal.LOWER_RIGHT: "--causal-lower-right"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which rung of the ladder serves a call, and why no higher one does.

    shape: None where the tensors are not an attention problem that we know.
    tuned_for: the shape that the config was tuned for.
    time_us: the time measured there.
    passed_over: the reasons of higher rungs.
    compared: what the config and its rivals are expected to take, where that decided.
    warnings: what was wrong with the sources.
    device: the `DeviceSpec.key` of the device whose configs were looked up; None where no lookup was made.
    """

    rung: Rung
    reason: str
    shape: AttentionShape | None = None
    config: KernelConfig | None = None
    origin: Origin | None = None
    tuned_for: AttentionShape | None = None
    time_us: float | None = None
    passed_over: tuple[Rejection, ...] = ()
    compared: tuple[Expectation, ...] = ()
    warnings: tuple[str, ...] = ()
    device: str | None = None

    @classmethod
    def of(
        cls,
        candidate: Candidate,
        shape: AttentionShape,
        passed_over: Iterable[Rejection] = (),
        warnings: tuple[str, ...] = (),
        device: DeviceSpec | None = None,
    ) -> Self:
        """Explain why this candidate serves this shape on a device."""
        reason = _REASONS[candidate.rung].format(
            how=_HOW[candidate.reuse] if candidate.reuse else "",
            tuned_for=candidate.tuned_for.label if candidate.tuned_for else "",
            flags=flags_of(shape, device),
            expected=candidate.compared[0].time_label if candidate.compared else "",
            count=len(candidate.compared),
            what="the kernel's default, " if candidate.origin is Origin.DEFAULT else "",
            elsewhere=_elsewhere(device) if candidate.rung is Rung.EXPECTED else "",
        )
        return cls(
            rung=candidate.rung,
            reason=reason,
            shape=shape,
            config=candidate.config,
            origin=candidate.origin,
            tuned_for=candidate.tuned_for,
            time_us=candidate.time_us,
            passed_over=tuple(passed_over),
            compared=candidate.compared,
            warnings=warnings,
            device=None if device is None else device.key,
        )

    @property
    def is_measured_here(self) -> bool:
        """Whether the config is a measurement of this shape on this device with this code; drivers may differ."""
        return self.rung in (Rung.EXACT, Rung.OTHER_DRIVER)

    @property
    def headline(self) -> str:
        """The answer in one line."""
        subject = self.shape.label if self.shape else "this call"
        config = f"{self.config.label}, " if self.config else ""
        return f"{subject}: {self.rung}: {config}{self.reason}"

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  passed over {rejection}" for rejection in self.passed_over]
        lines += [f"  compared with {rival.label}" for rival in self.compared[1 : SHOWN_RIVALS + 1]]
        return "\n".join(lines + [f"  warning: {warning}" for warning in self.warnings])

    def _repr_html_(self) -> str:
        """Return a table for a notebook: what serves the call, then why each higher rung does not."""
        config = self.config.label if self.config else "PyTorch"
        rows = {str(self.rung): f"{config}: {self.reason}"}
        rows |= {str(rejection.rung): rejection.reason for rejection in self.passed_over}
        rows |= {f"rival {number}": rival.label for number, rival in enumerate(self.compared[1 : SHOWN_RIVALS + 1], 1)}
        rows |= {"warning": "; ".join(self.warnings)} if self.warnings else {}
        return html_table(self.shape.label if self.shape else "this call", rows, bold={str(self.rung)})

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the field names of this class."""
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
        }
