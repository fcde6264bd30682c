"""The config that a command is about: the one that flags name, or the one that a call of the shape would get."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blocktune.cli.shared.compiled_config import CompileRequest, default_request
from blocktune.cli.shared.lookup import look_up
from blocktune.kernels.values.errors import NoFeasibleConfigError

if TYPE_CHECKING:
    from blocktune.db.records.records import Best
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.cost.analysis import Analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config, why this one, and what it took on this device. winner: the stored result for this very
    shape that it comes from, if any."""

    request: CompileRequest
    source: str
    measured_us: float | None
    winner: "Best | None" = None


def analyse_choice(choice: Choice, device: "DeviceSpec") -> "Analysis":
    """Compile a config and ask every model about it.

    Raises:
        NoFeasibleConfigError: it does not compile.
    """
    request, code = choice.request, choice.request.compile()

    from blocktune.tuner.cost.analysis import analyse

    return analyse(request.kernel, request.config, request.shape, device, code, measured_us=choice.measured_us)


def measured_time_us(store: "ResultStore | None", device: "DeviceSpec", request: CompileRequest) -> float | None:
    """Return what the config took on this device, if the database knows."""
    if store is None:
        return None
    from blocktune.tuner.cost.analysis import measured_time_us

    return measured_time_us(store, device, request.shape, request.config, request.kernel.source_hash)


def choose_config(
    store: "ResultStore | None",
    db: str | None,
    device: "DeviceSpec",
    shape: "AttentionShape",
    kernel: str | None,
    choices: dict[str, int | None],
    own: list[str],
) -> Choice:
    """Return the config that the flags name, else the one that a call of this shape would get.

    Raises:
        UsageError: the device has no units for the shape's data type, or the kernel lacks a choice.
    """
    from blocktune.tuner.cost.roofline import require_units

    require_units(shape.dtype, device)
    found = _default(kernel, device, shape) if kernel else _dispatcher_choice(store, db, device, shape)
    request = found.request.with_choices(choices, own)
    changed = request.config != found.request.config
    measured_us = None if changed else found.measured_us
    if measured_us is None:
        measured_us = measured_time_us(store, device, request)
    source = "as given" if changed else found.source
    return Choice(request=request, source=source, measured_us=measured_us, winner=found.winner)


def _default(kernel: str, device: "DeviceSpec", shape: "AttentionShape") -> Choice:
    return Choice(
        request=default_request(kernel, shape, device.limits), source="the kernel's default", measured_us=None
    )


def _dispatcher_choice(
    store: "ResultStore | None", db: str | None, device: "DeviceSpec", shape: "AttentionShape"
) -> Choice:
    """Return what the dispatcher's sources have for the shape. A time measured on this device for this shape is
    shown whatever the driver, compiler or source; the source line says which differs."""
    from blocktune.kernels.registry import get_kernel
    from blocktune.runtime.selection.ladder import Rung
    from blocktune.runtime.selection.reasons import explain_candidate

    of_this_shape = (Rung.EXACT, Rung.OTHER_DRIVER, Rung.OTHER_COMPILER, Rung.OTHER_SOURCE)
    answer = look_up(store, db, device, shape)
    candidate = answer.candidate
    if candidate is None:
        raise NoFeasibleConfigError(
            f"No kernel computes {shape.label} on {device.name}, so there is nothing to explain. PyTorch's "
            "scaled_dot_product_attention would."
        )
    reason, pytorchs = explain_candidate(candidate, shape, device=device).reason, answer.pytorchs
    return Choice(
        request=CompileRequest(get_kernel(candidate.config.kernel), candidate.config, shape, device.limits),
        source=reason if pytorchs is None else f"{reason}; a call gets PyTorch's attention: {pytorchs}",
        measured_us=candidate.time_us if candidate.rung in of_this_shape else None,
        winner=answer.winner if candidate.rung is Rung.EXACT else None,
    )
