"""`tune best`: the config that a call of this shape would get, where it comes from, and what was better or worse."""

from typing import TYPE_CHECKING

from blocktune.cli.output.render import note, print_json, print_table, say
from blocktune.cli.output.winners import COLUMNS, provenance, winner_json, winner_rows
from blocktune.cli.shared.kernels import KernelName, print_trials, require_kernels, trials_json
from blocktune.cli.shared.lookup import Answer, look_up, show_answer
from blocktune.cli.shared.options import (
    AsJson,
    Database,
    DeviceName,
    ShapeFlags,
    Verbose,
    kernel_instead,
    require_flags,
    with_optional_shape_flags,
)
from blocktune.cli.shared.stores import existing_store
from blocktune.cli.shared.summary import show_short
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec


@with_optional_shape_flags
def best(
    flags: ShapeFlags | None,
    autotuned: KernelName = None,
    device: DeviceName = None,
    db: Database = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show the best known config of a shape or an autotuned kernel.

    It answers as the dispatcher does: from the database, a neighbouring shape, the shipped results, the model or the
    kernel's default. Ends with exit code 3 when no kernel computes the shape, and 6 when no winner of an autotuned
    kernel is known.

    \b
    tune best --seq 8192 --dim 64
    tune best --seq 8192 --dim 64 --causal --device h200 --json
    tune best my_kernels:softmax
    """
    if autotuned is not None:
        _show_kernel(kernel_instead(flags, autotuned), choose_device(device), db, as_json=as_json)
        return
    flags = require_flags(flags)
    shape, spec = flags.shape(), choose_device(device)
    with existing_store(db) as store:
        answer = look_up(store, db, spec, shape)
    if as_json:
        print_json(answer.to_json())
    elif verbose:
        _show(answer, flags.assumed())
    else:
        show_short(answer, flags.assumed())
    if answer.candidate is None:
        raise NoFeasibleConfigError(f"No kernel computes {shape.label} on {spec.name}. Calls get PyTorch's attention.")


def _show_kernel(name: str, device: "DeviceSpec", db: str | None, *, as_json: bool) -> None:
    """Show the winner of each key of an autotuned kernel, with every trial.

    Raises:
        NothingMeasuredError: none is known.
    """
    found = require_kernels(db, device, name, with_trials=True)
    if as_json:
        rows = [winner_json(best) | trials_json(trials) for best, trials in found]
        print_json({"device": device.name, "kernels": rows})
        return
    for best, trials in found:
        title = f"{best.shape.full_label} on {device.name}"
        print_table(COLUMNS, winner_rows(best, {trial.config: trial.predicted_us for trial in trials}), title=title)
        print_trials(trials)
        say(f"{provenance(best)}, source {best.kernel_hash}\n")


def _show(answer: Answer, assumed: str) -> None:
    say(f"{answer.shape.label} on {answer.device.name}")
    if assumed:
        note(assumed)
    for reason in answer.passed_over:
        note(f"not {reason}")
    show_answer(answer)
