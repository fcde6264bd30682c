"""Why a config of attention serves a shape, in words, with the command that would measure it."""

import shlex
from collections.abc import Iterable

from blocktune.kernels.hardware.catalogue import entry_by_driver_name
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.shape import SHORT_DTYPES, AttentionShape, Causal, Direction
from blocktune.runtime.selection.correction import measured_elsewhere
from blocktune.runtime.selection.explanation import Explanation, measured_reason
from blocktune.runtime.selection.ladder import Candidate, Rejection, Rung

_REASONS = {
    Rung.EXPECTED: "{what}not measured, but expected to take {expected}{least}{elsewhere}: `tune run {flags}` measures",
    Rung.PREDICTED: "ranked first by the offline model for {tuned_for}",
    Rung.DEFAULT: "the kernel's default, not tuned: `tune run {flags}` looks for a better one",
}


def explain_candidate(
    candidate: Candidate,
    shape: AttentionShape,
    passed_over: Iterable[Rejection] = (),
    warnings: tuple[str, ...] = (),
    device: DeviceSpec | None = None,
) -> Explanation:
    """Return why this candidate serves this shape on a device."""
    reason = _REASONS[candidate.rung] if candidate.rung in _REASONS else measured_reason(candidate, "shape")
    reason = reason.format(
        tuned_for=candidate.tuned_for.label if candidate.tuned_for else "",
        flags=flags_of(shape, device),
        expected=candidate.compared[0].time_label if candidate.compared else "",
        least=f", the least of {count} configs" if (count := len(candidate.compared)) > 1 else "",
        what="the kernel's default, " if candidate.origin is Origin.DEFAULT else "",
        elsewhere=_elsewhere(device) if candidate.rung is Rung.EXPECTED else "",
    )
    return Explanation(
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
