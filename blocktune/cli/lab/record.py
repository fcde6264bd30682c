"""`tune lab record`: sweeps of many shapes with one GPU, one file per shape."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.output.render import note, print_json, say
from blocktune.cli.shared import completion
from blocktune.cli.shared.options import AsJson, DeviceName
from blocktune.cli.shared.shapes_file import flags_of_file, shard_of
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.measure.device_choice import choose_device, is_present, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.lab.recording import SweepRecorder


def record(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the sweeps.")],
    shapes_file: Annotated[Path, typer.Option("--shapes", help="TOML file of shapes, as for `tune run`.")],
    shard: Annotated[
        str,
        typer.Option("--shard", metavar="I/N", help="Only every Nth shape from the Ith on: the part of one of N GPUs."),
    ] = "1/1",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Seconds after which the command ends.")] = 1500.0,
    most: Annotated[
        int, typer.Option("--most", min=1, help="Configs per shape; of a larger space, its most promising part.")
    ] = 200,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="Only this kernel; may be repeated.", autocompletion=completion.kernels),
    ] = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Record a sweep of every shape that has none in the folder.

    A sweep is written when its shape is done. When the time ends, the current shape is written too; the same command
    continues with the shapes that have no file.

    \b
    tune lab record results/dense-sweeps --shapes results/dense-sweeps/shapes.toml
    tune lab record results/dense-sweeps --shapes results/dense-sweeps/shapes.toml --shard 2/4 --seconds 420
    """
    chosen, spec = shard_of(shard), choose_device(device)
    if not is_present(spec):
        raise UsageError(
            f"{spec.name} is not in this machine, and sweeps are recorded on the GPU itself. See `tune devices`."
        )
    shapes = tuple(dict.fromkeys(flags.shape() for flags in flags_of_file(shapes_file)))[chosen]
    if not shapes:
        raise UsageError(f"`--shard {shard}` leaves no shape of {shapes_file}. Take fewer shards.")
    written = _record(shapes, folder, spec, kernel or (), most, seconds)
    if as_json:
        print_json({"sweeps": list(written)})
        return
    for path in written:
        say(path)


def _record(
    shapes: "Sequence[AttentionShape]",
    folder: Path,
    device: "DeviceSpec",
    kernels: "Sequence[str]",
    most: int,
    seconds: float,
) -> "Iterator[str]":
    """Record the shapes that have no sweep; yield each file once it is written."""
    from blocktune.tuner.lab.sweep_file import Sweep, save_sweep
    from blocktune.tuner.measure.telemetry import gpu_lock

    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(gpu_lock(device.uuid, note))
        recorder = _recorder(stack, shapes[0], device, kernels, most)
        missing = [
            shape
            for shape in shapes
            if not (
                folder / Sweep(device=device, environment=recorder.environment, shape=shape, trials=()).file_name
            ).exists()
        ]
        note(f"{len(missing)} of {len(shapes)} shapes have no sweep in {folder}")
        for sweep in recorder.record(missing, seconds, note):
            yield str(save_sweep(sweep, folder))


def _recorder(
    stack: contextlib.ExitStack, shape: "AttentionShape", device: "DeviceSpec", kernels: "Sequence[str]", most: int
) -> "SweepRecorder":
    from blocktune.kernels.registry import competing, get_kernel
    from blocktune.tuner.lab.recording import SweepRecorder
    from blocktune.tuner.measure.environment import measuring_environment
    from blocktune.tuner.measure.runner import GpuRunner
    from blocktune.tuner.measure.telemetry import GpuMonitor
    from blocktune.tuner.search.run import farm_for

    monitor = GpuMonitor(device.uuid, own_processes=1)
    runner = GpuRunner(shape, environment=visible(device), monitor=monitor)
    stack.callback(runner.close)
    return SweepRecorder(
        device=device,
        environment=measuring_environment(device, monitor),
        runner=runner,
        compiler=stack.enter_context(farm_for(device)),
        kernels=[get_kernel(name) for name in kernels] or competing(),
        most=most,
    )
