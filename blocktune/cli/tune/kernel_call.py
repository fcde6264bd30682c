"""`tune run MODULE:KERNEL`: the calls that its flags mean, and the device that they are tuned on or compiled for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blocktune.cli.offline.tables import print_config_tables
from blocktune.cli.output.render import note, print_json
from blocktune.cli.shared.kernel_arguments import Sizes, grid_of, missed_sizes, requests_for
from blocktune.cli.shared.shapes_file import sizes_of_file
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.drop_in.request import LaunchRequest


@dataclass(frozen=True, slots=True)
class KernelCallFlags:
    """The flags that say how an autotuned kernel is called."""

    name: str
    make: str | None
    param: Sequence[str]
    expand: int

    def requests(
        self, grid: str | None, shapes_file: Path | None, missed_on: "DeviceSpec | None"
    ) -> "tuple[tuple[LaunchRequest, ...], bool]":
        """Return the calls, and whether they may be many.

        Args:
            grid: the text of `--grid`.
            shapes_file: a file with the sizes.
            missed_on: the device whose misses name the sizes.

        Raises:
            UsageError: a name is none, or the sizes come from several places or from none.
        """
        given = {"--grid": grid, "--shapes": shapes_file, "--from-misses": missed_on}
        places = [flag for flag, value in given.items() if value is not None]
        if len(places) > 1:
            raise UsageError(f"Sizes come from one place, but got {' and '.join(places)}. Leave one out.")
        sizes: Sequence[Sizes] = grid_of(grid)
        if shapes_file is not None:
            sizes = sizes_of_file(shapes_file)
        elif missed_on is not None:
            sizes = missed_sizes(self.name, missed_on)
        requests = requests_for(self.name, self.make, sizes, self.param, self.expand)
        return requests, len(requests) > 1 or bool(places)


def device_of(kernel: str, name: str | None, *, on_cluster: bool) -> "DeviceSpec":
    """Return the GPU that a kernel is tuned on: here, or a kind of a cluster; or one that it is compiled for.

    Raises:
        NoDeviceError: none is named, and there is none here.
    """
    from blocktune.kernels.hardware import device as devices
    from blocktune.tuner.drop_in.decide import needing_a_gpu

    if on_cluster:
        return choose_device()
    if name is None:
        with needing_a_gpu(kernel):
            return devices.current_device()
    return choose_device(name)


def show_offline(requests: "Sequence[LaunchRequest]", device: "DeviceSpec", *, as_json: bool) -> None:
    """Compile every config of some calls for a device that is not here, and print what each takes: without a cost model
    of the kernel, nothing says which is fastest.

    Raises:
        UsageError: the arguments of a call cannot be made, or the kernel refuses them.
    """
    from blocktune.tuner.dry_run.explain import explain_request

    note(f"no {device.name} in this machine: every config is compiled for it, and none is timed")
    tables = [table for request in requests for table in explain_request(request, device).tables]
    if as_json:
        print_json({"device": device.to_json(), "tables": [table.to_json() for table in tables]})
    else:
        print_config_tables(tables)
