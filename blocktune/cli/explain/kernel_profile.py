"""`tune profile MODULE:KERNEL`: counters of Nsight Compute for the winner of one call of an autotuned kernel."""

from typing import TYPE_CHECKING

from blocktune.cli.output.render import print_json, print_table, say
from blocktune.cli.shared.kernel_arguments import grid_of, requests_for
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import NoDeviceError, NothingMeasuredError, UsageError
from blocktune.tuner.measure.device_choice import is_present

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.runtime.autotuned.config import LaunchConfig
    from blocktune.tuner.drop_in.request import LaunchRequest


def profile_kernel(
    name: str, make: str | None, grid: str | None, device: "DeviceSpec", db: str | None, *, as_json: bool
) -> None:
    """Launch the winner of a call under `ncu`, and show what it counts.

    Raises:
        UsageError: a name is none, or there are several sizes.
        NoDeviceError: the device or `ncu` is not here.
        NothingMeasuredError: no winner of the call is known.
    """
    from blocktune.tuner.profile.counters import Counters
    from blocktune.tuner.profile.nsight_compute import record_launch

    request, *others = requests_for(name, make, grid_of(grid))
    if others:
        raise UsageError(f"One call is profiled, but --grid has {1 + len(others)} sizes. Name one.")
    if not is_present(device):
        raise NoDeviceError(
            f"{device.name} is not in this machine, so no counters of {name} can be recorded. `tune explain {name}` "
            "shows its code without a GPU."
        )
    config = _winner(request, device, db)
    counters = Counters.parse(record_launch(request, config))
    if as_json:
        print_json({"device": device.name, "config": config.to_json(), "launches": counters.to_json()})
        return
    say(f"{request.label} on {device.name}\n{config.label}; times in microseconds")
    for launch in counters.launches:
        say("")
        print_table((launch.kernel, "counted"), [(metric, f"{value:,.2f}") for metric, value in launch.metrics.items()])


def _winner(request: "LaunchRequest", device: "DeviceSpec", db: str | None) -> "LaunchConfig":
    """Return the winner of a call.

    Raises:
        NothingMeasuredError: none is known.
    """
    from blocktune.tuner.upkeep.verify_launch import stored_winner

    with existing_store(db) as store, request.open_call() as call:
        best = None if store is None else stored_winner(call, device, store)
    if best is None:
        raise NothingMeasuredError(
            f"No winner of {request.label} is known on {device.name}. Tune it: `tune run {request.kernel} --args "
            f"{request.arguments}`, with the same --grid."
        )
    return best.config
