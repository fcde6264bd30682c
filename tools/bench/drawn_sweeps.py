"""Records sweeps of shapes drawn at random, of a few configs of each tile that may be best: about 2 s a shape.

python -m tools.bench.drawn_sweeps SEED FOLDER [COUNT] [SECONDS]

`tune lab record` measures what a search would try, which is many variants of few tiles. Where the rules that choose a
tile are in question, every tile counts and its variants do not. Shapes are those of `drawn_shapes` but for backwards;
all configs are compiled from the start.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.registry import competing, get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.lab.recording import SweepRecorder
from blocktune.tuner.lab.sweep_file import Sweep, save_sweep
from blocktune.tuner.measure.device_choice import visible
from blocktune.tuner.measure.environment import measuring_environment
from blocktune.tuner.measure.runner import GpuRunner
from blocktune.tuner.measure.telemetry import GpuMonitor, gpu_lock
from blocktune.tuner.search.run import farm_for
from tools.bench.drawn_shapes import draw_shapes

MOST = 26
"""Configs of a shape."""

FORWARD_NAMES = (
    "block_m", "block_n", "num_stages", "split_release", "early_p", "keep_p", "q_registers", "output_panels",
)  # fmt: skip
FORWARD = (
    (128, 64, 3, 0, 0, 0, 0, 0), (128, 64, 4, 0, 0, 1, 64, 0), (128, 64, 4, 0, 0, 0, 128, 0),
    (128, 128, 2, 1, 0, 0, 0, 0), (128, 128, 2, 1, 1, 1, 0, 0), (128, 128, 3, 0, 0, 0, 0, 0),
    (128, 128, 3, 0, 1, 1, 0, 0), (192, 64, 4, 0, 1, 0, 0, 0), (192, 64, 4, 0, 1, 0, 64, 0),
    (192, 64, 3, 0, 0, 0, 0, 0), (192, 64, 4, 0, 0, 0, 0, 0),
)  # fmt: skip
FORWARD_BY_WIDTH = {
    64: (
        (256, 64, 4, 0, 1, 0, 0, 0), (256, 64, 3, 0, 1, 0, 0, 0), (192, 128, 4, 0, 1, 0, 0, 0),
        (128, 128, 4, 0, 0, 1, 0, 0), (128, 128, 4, 0, 0, 1, 64, 0), (192, 64, 4, 0, 1, 0, 64, 0),
        (192, 64, 4, 0, 1, 0, 0, 0), (192, 64, 4, 0, 0, 0, 0, 0), (128, 64, 4, 0, 0, 1, 64, 0),
    ),
    192: (
        (128, 64, 3, 0, 0, 0, 0, 0), (128, 64, 3, 0, 0, 0, 64, 0), (128, 64, 3, 0, 0, 1, 0, 0),
        (128, 64, 3, 0, 0, 0, 192, 0), (128, 64, 2, 1, 1, 1, 0, 0), (192, 64, 3, 0, 1, 0, 0, 0),
    ),
    256: (
        (128, 64, 4, 2, 1, 0, 128, 1), (128, 64, 5, 2, 1, 0, 128, 1), (128, 64, 5, 2, 0, 0, 64, 0),
        (128, 64, 2, 1, 0, 0, 0, 0), (128, 64, 2, 1, 1, 1, 0, 0),
    ),
}  # fmt: skip

HOPPER_DECODE = ((128, 8), (128, 4), (256, 8), (64, 4), (512, 8))
"""block_n and num_warps."""

PORTABLE_DECODE = {
    16: ((128, 4, 3), (64, 2, 2), (64, 4, 4)),
    32: ((128, 4, 3), (256, 8, 2), (64, 4, 4)),
    64: ((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3), (64, 4, 2)),
}
"""By block_m: block_n, num_warps and num_stages."""

NEAR_SPLITS = (1, 2, 0.5)
"""Splits that are tried, over those that the model takes for the best."""


def forward_configs(shape: AttentionShape) -> Iterator[KernelConfig]:
    for values in FORWARD_BY_WIDTH.get(shape.head_dim, FORWARD):
        parameters = dict(zip(FORWARD_NAMES, values, strict=True)) | {"num_warps": 4}
        yield KernelConfig.of("flash_fwd_hopper", parameters)


def decode_configs(shape: AttentionShape, device: DeviceSpec) -> Iterator[KernelConfig]:
    for block_n, warps in HOPPER_DECODE:
        for stream in (0, 1):
            tile = {"block_m": 16, "block_n": block_n, "num_warps": warps, "num_stages": 1, "stream": stream}
            yield from _with_splits("flash_decode_hopper", tile, shape, device)
    rows = shape.group_size * shape.seqlen_q
    for block_m in (block for block in PORTABLE_DECODE if block == 16 or rows > block // 2):
        for block_n, warps, stages in PORTABLE_DECODE[block_m]:
            tile = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages, "overlap": 1}
            yield from _with_splits("flash_decode", tile, shape, device)


def _with_splits(name: str, tile: dict[str, int], shape: AttentionShape, device: DeviceSpec) -> Iterator[KernelConfig]:
    """Yield a tile with the splits that the model takes for the best, and near ones."""
    kernel = get_kernel(name)
    splits = {count: KernelConfig.of(name, tile | {"splits": count}) for count in kernel.parameters["splits"]}
    able = {count: config for count, config in splits.items() if not kernel.omissions(config, shape, device.limits)}
    if able:
        best = min(able, key=lambda count: usefulness(kernel, able[count], shape, device))
        yield from (able[best * near] for near in NEAR_SPLITS if best * near in able)


def configs_of(shape: AttentionShape, device: DeviceSpec) -> list[KernelConfig]:
    """Return what is measured: what calls get, the kernels' defaults, then the others, those of a decoding in the
    model's order."""
    contenders = find_contenders(shape, device, competing(), ())
    defaults = [kernel.default_config(shape, device.limits) for kernel in kernels_for(shape, device.limits)[:2]]
    few = shape.seqlen_q <= 16
    others = list(decode_configs(shape, device) if few else forward_configs(shape))
    if few:
        others.sort(key=lambda config: usefulness(get_kernel(config.kernel), config, shape, device))
    every = dict.fromkeys((*contenders.expected[:2], contenders.default, *defaults, *others))
    able = [config for config in every if not get_kernel(config.kernel).omissions(config, shape, device.limits)]
    return able[:MOST]


@dataclass(frozen=True, slots=True, kw_only=True)
class PickingRecorder(SweepRecorder):
    """A recorder of given configs, all of which are compiled from the start."""

    def sweeps(self, shapes: Sequence[AttentionShape], seconds: float) -> Iterator[Sweep]:
        """Yield the sweep of every shape that is measured whole within these seconds."""
        end = time.monotonic() + seconds
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            picked = list(pool.map(partial(configs_of, device=self.device), shapes))
        cc = self.device.limits.cc
        compiled = [
            [(config, self.compiler.submit(config.kernel, config, shape, cc)) for config in configs]
            for shape, configs in zip(shapes, picked, strict=True)
        ]
        for shape, each in zip(shapes, compiled, strict=True):
            self.runner.turn_to(shape)
            trials = tuple(self._trials(shape, each, end))
            if len(trials) < len(each):
                return
            yield Sweep(device=self.device, environment=self.environment, shape=shape, trials=trials)


def main(seed: int, folder: Path, count: int = 40, seconds: float = 120.0) -> None:
    device = current_device()
    shapes = [shape for shape in draw_shapes(seed, count) if shape.direction is Direction.FORWARD]
    monitor = GpuMonitor(device.uuid, own_processes=1)
    runner = GpuRunner(shapes[0], environment=visible(device), monitor=monitor)
    with ExitStack() as stack:
        stack.enter_context(gpu_lock(device.uuid, print))
        farm = stack.enter_context(farm_for(device))
        stack.callback(runner.close)
        runner.prepare()
        recorder = PickingRecorder(
            device=device,
            environment=measuring_environment(device, monitor),
            runner=runner,
            compiler=farm,
            kernels=competing(),
            most=MOST,
        )
        for sweep in recorder.sweeps(shapes, seconds):
            print(save_sweep(sweep, folder), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5]))
