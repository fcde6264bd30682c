"""A worker as `blocktune.tuner.launches.measure_worker` on a fake GPU, where large blocks crash or hang."""

import os
import time

from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.launches.measure_worker import main
from tests.support.fakes.fake_triton import FakeGpu, FakeHookedClock, Launch, active


def effect(launch: Launch) -> None:
    block = launch.arguments["BLOCK"]
    if block == 512 and launch.num_warps == 4:
        os.abort()
    if block == 512:
        time.sleep(1000)


gpu = FakeGpu(lambda launch: float(100 + launch.grid[0] + launch.num_warps), effect)
with active(gpu):
    main(LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None))
