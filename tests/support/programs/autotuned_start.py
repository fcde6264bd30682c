"""A process that launches an autotuned kernel on a fake GPU: autotuned_start FOLDER. Prints whether it measured, and
what it chose; the times are noise of its own, so that processes agree only by telling each other."""

import json
import os
import random
import sys

import torch
import triton

from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.tuned import decide, node_lock, tune_call
from blocktune.tuner.tuned.autotune import autotune
from blocktune.tuner.tuned.tune_call import Tools
from tests.support.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.fake_triton import FakeGpu, FakeTurnClock, active

folder = sys.argv[1]
os.environ["BLOCKTUNE_DB"] = f"{folder}/store.db"
os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
chance = random.Random(os.getpid())
slow = {(config.kwargs["BLOCK"], config.num_warps): chance.uniform(100, 200) for config in CONFIGS}
gpu = FakeGpu(lambda launch: slow[launch.arguments["BLOCK"], launch.num_warps])
node_lock.platformdirs.user_cache_dir = lambda *_, **__: f"{folder}/cache"
decide.current_device = lambda: device_named("h200")
tune_call.machine = lambda: Tools(make_clock=lambda l2: FakeTurnClock(gpu))

x = torch.ones(1000)
kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
with active(gpu):
    kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, 1000, 2.0)
(choice,) = kernel.kernel.choices.values()
print(json.dumps([choice.tuned, choice.label]))
