"""The one decision for shapes that were not tuned: which config is expected to be the fastest.

Candidates are the kernels' defaults, the configs that did well for near shapes, winners that were stored for such, and
other values of what follows from the shape. Each gets the time that the model predicts, corrected by all that was
measured on this device, with its uncertainty; the lowest is taken, a surer one before an equal one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.bindings import bound_value
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.correction import (
    DeviceCorrection,
    RelativeConfig,
    config_from,
    relative_config,
    shipped_correction,
)
from blocktune.runtime.selection.expectation import Estimator, Expectation, Guess
from blocktune.runtime.selection.near_shapes import representative
from blocktune.runtime.store_reader.tuned_config import TunedConfig

MOST, MOST_OF_OTHERS = 6, 2
"""Configs that did well for near shapes and are compared, of the first kernel and of each other one. The model takes
about 0.1 ms for each."""

HOPELESS = 0.1
"""A kernel whose default is surely slower than the first one's by this share, as a logarithm, offers that alone."""

STEPS = (-1, 1)
"""How far from the default's number of splits others are tried, of which nothing may have been measured."""

OTHER_DEVICE = 1.0
"""Doublings of distance that a measurement of another device of the same compute capability counts as."""

LAUNCH_BOUND_US = 14.0
"""Expected time in microseconds up to which the first kernel's default serves alone. Such calls take 6 to 16 us on an
H200, most of it for the start of a block: the model, which counts bytes and products, cannot tell configs apart there.
"""

Predict = Callable[[AttentionKernel, KernelConfig, AttentionShape, DeviceSpec], float]
"""The model's time of a config in microseconds."""

Serving = Callable[[AttentionShape, ComputeLimits], Sequence[AttentionKernel]]
"""Which kernels compute a shape, the one that mostly is the fastest first."""


@dataclass(frozen=True, slots=True)
class Untuned:
    """Decides for the shapes of one device.

    correction: what was measured there. predict: the model. serving: the kernels that compete for a shape.
    """

    device: DeviceSpec
    correction: DeviceCorrection
    predict: Predict
    serving: Serving = kernels_for

    def choices(self, shape: AttentionShape, near: Sequence[TunedConfig] = ()) -> list[Expectation]:
        """Return the candidates for a shape, the one to take first; none where no kernel computes it, and the first
        kernel's default alone up to `LAUNCH_BOUND_US`.

        The times are those of its `representative`.

        Args:
            shape: the shape.
            near: winners of shapes of its kind.
        """
        shape = representative(shape)
        kernels = self.serving(shape, self.device.limits)
        if not kernels:
            return []
        found: dict[KernelConfig, tuple[float, Expectation]] = {}
        for one in self._expectations(shape, kernels, near):
            caution = self.correction.trust.caution * one.spread
            found.setdefault(one.config, (math.log(one.ratio) + caution, one))
        return [one for _, one in sorted(found.values(), key=lambda pair: pair[0])]

    def _expectations(
        self, shape: AttentionShape, kernels: Sequence[AttentionKernel], near: Sequence[TunedConfig]
    ) -> Iterator[Expectation]:
        limits, further = self.device.limits, 0.0 if self.device.key == self.correction.device else OTHER_DEVICE
        estimator, first = Estimator(shape, self.correction, further), kernels[0].name
        base = level = 0.0
        for kernel in kernels:
            default = kernel.default_config(shape, limits)
            predicted = math.log(self.predict(kernel, default, shape, self.device))
            if kernel.name == first:
                base, level = predicted, predicted + estimator.level()
            over_first, shapes = estimator.default_over_first(kernel.name, first, predicted - base)
            yield _expectation(default, level, over_first, shapes)
            if math.exp(level) <= LAUNCH_BOUND_US:
                return
            if over_first.mean - 2 * math.sqrt(over_first.variance) > HOPELESS:
                continue
            most = MOST if kernel.name == first else MOST_OF_OTHERS
            stored = self._stored_winners(kernel, near)
            for config, relative in self._candidates(estimator, kernel, default, shape, stored, most):
                change = math.log(self.predict(kernel, config, shape, self.device)) - predicted
                for won in stored.get(relative, ()):
                    estimator.learn_winner(kernel.name, relative, won, change)
                guess, shapes = estimator.config_over_default(kernel.name, relative, change)
                yield _expectation(config, level, over_first.plus(guess), shapes)

    def _candidates(
        self,
        estimator: Estimator,
        kernel: AttentionKernel,
        default: KernelConfig,
        shape: AttentionShape,
        stored: Iterable[RelativeConfig],
        most: int,
    ) -> Iterator[tuple[KernelConfig, RelativeConfig]]:
        """Yield the configs of a kernel that may be faster than its default and can run, the most promising first."""
        relatives = dict.fromkeys(stored)
        relatives |= dict.fromkeys(_split_steps(kernel, default))
        relatives |= dict.fromkeys(estimator.most_promising(kernel.name, most))
        seen = {default}
        for relative in relatives:
            if dict(relative).keys() != kernel.parameters.keys():
                continue  # measured when the kernel had other parameters
            config = config_from(kernel, relative, default)
            if config not in seen and not kernel.omissions(config, shape, self.device.limits):
                seen.add(config)
                yield config, relative

    def _stored_winners(
        self, kernel: AttentionKernel, near: Iterable[TunedConfig]
    ) -> dict[RelativeConfig, list[AttentionShape]]:
        """Return the stored winners of a kernel, by their steps from the defaults, with the shapes that they won."""
        found: dict[RelativeConfig, list[AttentionShape]] = {}
        for row in near:
            if row.config.kernel == kernel.name and kernel.unsupported(row.shape, self.device.limits) is None:
                there = kernel.default_config(row.shape, self.device.limits)
                relative = relative_config(kernel, row.config, there)
                if relative is not None:
                    found.setdefault(relative, []).append(row.shape)
        return found


def shipped_untuned(device: DeviceSpec) -> Untuned | None:
    """Return what decides by the correction that ships for a device; None where none does.

    Raises:
        UsageError: the correction is broken.
    """
    correction = shipped_correction(device.key)
    if correction is None:
        return None
    return Untuned(device, correction, bound_value("usefulness"))


def _split_steps(kernel: AttentionKernel, default: KernelConfig) -> Iterator[RelativeConfig]:
    """Yield the default with other numbers of splits, where a kernel has such."""
    own = relative_config(kernel, default, default)
    if own is None or "splits" not in kernel.follows_shape:
        return
    for step in STEPS:
        yield tuple((name, step if name == "splits" else value) for name, value in own)


def _expectation(config: KernelConfig, level: float, guess: Guess, shapes: int) -> Expectation:
    return Expectation(
        config=config,
        time_us=math.exp(level + guess.mean),
        ratio=math.exp(guess.mean),
        spread=math.sqrt(guess.variance),
        shapes=shapes,
    )
