"""Bytes and operations of a launch, and the least time that the device needs for them.

The author says it: a function given to `autotune(costs=...)`, else `launch_metadata` of `triton.jit`, as profilers read
it. Else the compiled code is counted, where it has no loop. Else nothing is known but the resources.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.cost.roofline import peak_tflops
from blocktune.tuner.launches.saved_call import meta_of
from blocktune.tuner.offline.counts import counts_in

logger = logging.getLogger("blocktune")

NAMES = ("bytes", "flops")

NO_COSTS = "what a launch moves and computes is not known, so the search goes by resources and times alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes and operations of one launch. source: where they come from."""

    bytes: float
    flops: float
    source: str

    def least_us(self, device: DeviceSpec) -> float:
        """Return the time that no launch can beat on a device; 0 where its rates are unknown. Products in 8 bits are
        twice as fast as those in 16, and may be among these."""
        if device.memory_gbs is None:
            return 0.0
        try:
            peak = 2 * peak_tflops(device, "bfloat16", device.limits.mma)
        except UsageError:
            return 0.0
        return max(self.bytes / device.memory_gbs / 1e3, self.flops / peak / 1e6)

    def words(self, time_us: float, device: DeviceSpec) -> str:
        """Return the rates of a launch that takes this long, for people."""
        share = self.least_us(device) / time_us
        rates = f"{self.bytes / time_us / 1e3:,.0f} GB/s, {self.flops / time_us / 1e6:,.1f} TFLOP/s by {self.source}"
        return f"{rates}, {share:.0%} of what {device.name} allows" if share else rates


def author_costs(call: AutotunedCall, config: LaunchConfig) -> Costs | None:
    """Return what the function `costs` says of a launch with a config; None where the kernel has none.

    Raises:
        UsageError: it returns something other than numbers.
    """
    if call.settings.costs is None:
        return None
    found = call.settings.costs(call.named_with(config))
    costs = _as_costs(found, "its `costs`")
    if costs is None or not set(found) <= set(NAMES):
        raise UsageError(
            f"The `costs` of {call.name} must return the numbers `bytes` and `flops` by name, but returned "
            f"{found!r:.200}. "
            'For example: {"bytes": 2 * x.numel() * x.element_size(), "flops": 0}.'
        )
    return costs


def costs_of(call: AutotunedCall, config: LaunchConfig) -> Costs | None:
    """Return what a launch with a config costs, or None where that is not known. The config must have been launched.

    Raises:
        UsageError: the function that was given for it returns something other than numbers.
    """
    if call.settings.costs is not None:
        return author_costs(call, config)
    chosen, options = call.launched(config), call.launched(config).all_kwargs()
    if chosen.pre_hook is not None:  # descriptors still have the blocks of whichever config was launched last
        chosen.pre_hook(call.named_with(config))
    compiled = call.tuner.fn.run(*call.args, **{**call.kwargs, **options, "warmup": True})
    if compiled is None:  # a hook keeps Triton from having it
        return None
    meta = meta_of(call, options)
    blocks = call.grid(meta)
    if call.function.launch_metadata is not None:
        return _of_metadata(call, blocks, compiled, meta)
    counts = counts_in(compiled.asm.get("ptx", ""), compiled.metadata.num_warps)
    if counts is None:
        return None
    launched = math.prod(blocks)
    return Costs(bytes=counts.bytes * launched, flops=counts.flops * launched, source="its compiled code")


def rates_of(call: AutotunedCall, config: LaunchConfig, time_us: float, device: DeviceSpec) -> str:
    """Return what launches of a measured config move and compute a second, in words; where that is not known, nothing,
    or that a search beyond the list had to do without it."""
    if call.settings.isolate:
        return ""
    costs = costs_of(call, config)
    if costs is None:
        return NO_COSTS if call.settings.expand else ""
    return costs.words(time_us, device) if time_us else ""


def _of_metadata(call: AutotunedCall, blocks: tuple[int, ...], compiled: Any, meta: Mapping[str, Any]) -> Costs | None:
    """Return what `launch_metadata` says. Triton calls it only for profilers, so no launch fails by its error."""
    try:
        found = call.function.launch_metadata(blocks, compiled.metadata, meta)
        flops = sum(value for name, value in found.items() if name.startswith("flops"))
        return _as_costs({"bytes": found.get("bytes", 0), "flops": flops}, "its `launch_metadata`")
    except Exception as error:  # whatever a library's function raises without a profiler
        logger.info("`launch_metadata` of %s does not tell its costs: %s", call.name, error)
        return None


def _as_costs(found: Any, source: str) -> Costs | None:
    """Return costs of numbers by name; None if they are anything else."""
    values = [found.get(name, 0) if isinstance(found, Mapping) else None for name in NAMES]
    if not all(isinstance(value, (int, float)) and 0 <= value < math.inf for value in values):
        return None
    return Costs(bytes=float(values[0] or 0), flops=float(values[1] or 0), source=source)
