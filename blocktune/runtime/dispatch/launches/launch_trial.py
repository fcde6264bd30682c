"""Trying configs with a call: the first launch of each, in memory of its own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import AttentionKernel, Launch
from blocktune.kernels.base.precision import product_precision
from blocktune.kernels.portable.sinks.results import with_sink_pass
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.launches.plans import adds_sinks, takes_extras
from blocktune.runtime.dispatch.launches.results import new_gradients, new_results
from blocktune.runtime.dispatch.launches.triton_key import await_triton_key
from blocktune.runtime.selection import canary


@dataclass(frozen=True, slots=True)
class LaunchTrial:
    """A call that configs are tried with.

    shape: of one direction. arguments: all of a launch without sinks: query, key, value and output, then what this
    direction has. compared: whether the output may be compared with attention: the tensors hold what the call is about.
    """

    call: Call
    shape: AttentionShape
    arguments: tuple[Any, ...]
    compared: bool = True

    @classmethod
    def of(
        cls, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor, call: Call, *, sums: bool,
        compared: bool = True,
    ) -> "LaunchTrial":  # fmt: skip
        """Return the trial of a call, with memory of its own. sums: a forward leaves the log-sum-exp."""
        packed, is_backward = call.features.varlen, shape.direction is Direction.BACKWARD
        out, lse = new_results(query, value, packed=packed, sums=sums or is_backward)
        inputs: tuple[Any, ...] = (query, key, value, out, lse)
        extras = (call.extras,) if takes_extras(call, shape.direction) else ()
        if is_backward:
            gradients = new_gradients(query, key, value, packed=packed)
            inputs = (query, key, value, out.zero_(), torch.zeros_like(lse), torch.zeros_like(out), *gradients)
        return cls(call, shape, (*inputs, call.scale, *extras), compared)

    @property
    def device_index(self) -> int | None:
        """The CUDA index of the tensors' device."""
        index: int | None = self.arguments[0].device.index
        return index

    @property
    def results(self) -> tuple[Any, ...]:
        """Query, key, value, output and log-sum-exp, and of a backward the gradients."""
        return self.arguments[: 5 if self.shape.direction is Direction.FORWARD else 9]

    def rows(self) -> canary.Rows | None:
        """Return the rows by which a first use is checked, and fill in what a backward needs for them; or None."""
        if not self.compared:
            return None
        return canary.sampled(self.shape, self.call.extras, self.call.scale, self.results)

    def problem(self, config: KernelConfig, rows: canary.Rows | None) -> str | None:
        """Return how the results of a config differ from attention in these rows; or None."""
        return canary.problem_of(config, self.shape, self.call.extras, self.call.scale, self.results, rows)

    def launched(self, kernel: AttentionKernel, config: KernelConfig) -> Launch:
        """Return the shortest launcher of a kernel with a config, after it has computed the call."""
        await_triton_key()
        sunk = adds_sinks(self.call, self.shape.direction)
        own = kernel.bind_with_sinks(config, self.shape) if sunk else None
        if own is not None:
            return _launched(own, (*self.arguments[:6], self.call.extras))
        bind = kernel.bind_batch_invariant if self.call.num_splits else kernel.bind
        launch = _launched(bind(config, self.shape), self.arguments)
        if not sunk:
            return launch
        whole = with_sink_pass(launch, takes_extras=len(self.arguments) > 6)
        whole(*self.arguments[:6], self.call.extras)  # the results that are compared have sinks in them
        return whole

    def kind(self, config: KernelConfig) -> tuple[Any, ...]:
        """Return what a failure of a config holds for."""
        shape, blocks = self.shape, self.call.block_sizes
        sizes = (shape.dtype, product_precision(shape.dtype), shape.head_dim, shape.head_dim_v, blocks)
        return (config, self.arguments[0].device, *sizes, shape.causal, shape.features)


def _launched(bound: Launch, arguments: tuple[Any, ...]) -> Launch:
    """Return the shortest launcher of a bound config, after it has computed these arguments, whose first one is the
    query."""
    query = arguments[0]
    with torch.cuda.device_of(query):
        if hasattr(bound, "pinned"):
            return on_its_device(bound.pinned(*arguments), query.device.index)
        bound(*arguments)
    return on_its_device(bound, query.device.index)


def on_its_device(launch: Launch, index: int) -> Launch:
    """Return the launch with the tensors' device as the current one, which is where Triton launches. Itself with one
    GPU."""
    if torch.cuda.device_count() < 2:
        return launch

    def guarded(*arguments: Any) -> None:
        if torch.cuda.current_device() == index:
            launch(*arguments)
        else:
            with torch.cuda.device(index):
                launch(*arguments)

    return guarded
