"""`tune best MODULE:KERNEL`: the winners of an autotuned kernel, and what was better or worse."""

from typing import TYPE_CHECKING

from blocktune.cli.autotuned.rows import TRIALS, parameters, require_kernels, trial_row, winner_json
from blocktune.cli.output.render import microseconds, print_json, print_table, say

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.kernels.hardware.device import DeviceSpec


def show_best(name: str, device: "DeviceSpec", db: str | None, *, as_json: bool) -> None:
    """Show the winner of each key of a kernel, with every trial.

    Raises:
        NoFeasibleConfigError: none is known.
    """
    found = require_kernels(db, device, name, with_trials=True)
    if as_json:
        print_json({"device": device.name, "kernels": [winner_json(best, trials) for best, trials in found]})
        return
    for best, trials in found:
        say(f"{best.config.kernel} {best.shape.label} on {device.name}")
        say(f"{parameters(best.config.label)}: {microseconds(best.time_us)}{_against_first(best)}")
        print_table(TRIALS, [trial_row(trial) for trial in trials], optional=("remark",))
        environment = best.environment
        say(
            f"measured {best.created_at:%Y-%m-%d %H:%M} UTC, triton {environment.triton}, ptxas {environment.ptxas}, "
            f"source {best.kernel_hash}\n"
        )


def _against_first(best: "KernelBest") -> str:
    if best.config == best.default:
        return ", the first of its list"
    if best.default is None or best.speedup_over_default is None:
        return ""
    return (
        f", {best.speedup_over_default:.3f} times as fast as the first of its list ({parameters(best.default.label)})"
    )
