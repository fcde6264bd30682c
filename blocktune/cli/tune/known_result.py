"""The known result of a shape, which `tune run` shows before it predicts: a measurement that ships with the package or
was imported."""

from typing import TYPE_CHECKING

from blocktune.cli.output.render import note, say
from blocktune.cli.shared.lookup import Answer, look_up, show_answer
from blocktune.cli.tune.report_text import occupancy_text

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.compile_server.background import Compiler


def known_result(store: "ResultStore", db: str | None, device: "DeviceSpec", shape: "AttentionShape") -> Answer | None:
    """Return the measurement that a call of this shape would be served by on a device, if there is any."""
    answer = look_up(store, db, device, shape)
    return answer if answer.is_measured else None


def show_known_result(known: Answer, compiler: "Compiler") -> None:
    """Print a measurement at once, then the occupancy of its config, which has to be compiled first."""
    from blocktune.tuner.occupancy.calculator import occupancy

    assert known.candidate is not None
    config, limits = known.candidate.config, known.device.limits
    say(f"{known.shape.label} on {known.device.name}")
    show_answer(known)
    note(f"compiling {config.label}, which takes some seconds")
    resources = compiler.submit(config.kernel, config, known.shape, limits.cc).result().resources
    if resources is not None:
        say(occupancy_text(config, occupancy(resources, limits)) + "\n")
