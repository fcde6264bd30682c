"""Everything the models say about one compiled config, put together: what `tune explain` shows.

    analysis = analyse(kernel, config, shape, device, code, measured_us=1690.0)
    analysis.breakdown.binding, analysis.model_error

A backward and a decoding are analysed as the forward whose grid and tiles are theirs (`as_forward` of the kernel),
but for bytes, which tuner/traffic/by_kernel.py counts from the loops that it declares. `tuner/cost/text.py` says it in
words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.base.on_chip import OnChip
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.bindings import bound_value
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.kernels.values.text import counted, html_table
from blocktune.tuner.cost.bands import TRUSTED_ERROR, Band, band_of, predicted_text
from blocktune.tuner.cost.breakdown import CostBreakdown
from blocktune.tuner.cost.model import density_of, folded_forward, predict_launches
from blocktune.tuner.cost.roofline import (
    Roofline,
    block_intensity,
    library_instruction,
    missing_rates,
    roofline,
    waves_of,
)
from blocktune.tuner.cost.term_texts import lifts_of, terms_of
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from blocktune.tuner.occupancy.tiles_by_kernel import on_chip_of
from blocktune.tuner.occupancy.waves import Waves
from blocktune.tuner.traffic.backward import standard_backward_traffic
from blocktune.tuner.traffic.by_kernel import is_plain_v2, traffic_of
from blocktune.tuner.traffic.launches import Pass, Passes
from blocktune.tuner.traffic.least import least_bytes
from blocktune.tuner.traffic.model import Traffic, standard_memory_problem, standard_traffic, v1_traffic, v2_traffic

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore

UNCACHED, ONCE = ("own", "v2"), ("own_perfect_l2", "v2_perfect_l2")
"""Names of `Analysis.traffic`: of the kernel itself, or of the algorithm that it is an example of."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Analysis:
    """One config on one device.

    alternatives: shared bytes of a block after one step down of a parameter, by the step's name.
    lifts: what would make each term of the breakdown smaller, by the choices that the kernel has.
    waves: None where no block fits.
    breakdown: None where no block fits, or where rates of the device are unknown.
    missing_rates: names those unknown rates.
    traffic: bytes of device memory by algorithm, at this config's block sizes.
    rooflines: empty where rates of the device are unknown.
    block_intensity: FLOP per byte that a block reads while it walks along keys; None where it walks along queries.
    density: the share of blocks that a block mask is taken to leave.
    on_chip: None for kernels whose tiles are not listed.
    standard_problem: why standard attention would not fit this device.
    shared: how the compiled loop reads shared memory, None where that is not known.
    measured_us: of this very config on this device, None if that is not known.
    """

    device: DeviceSpec
    shape: AttentionShape
    config: KernelConfig
    occupied: Occupancy
    alternatives: Mapping[str, int] = field(hash=False)
    lifts: Mapping[str, str] = field(hash=False)
    waves: Waves | None
    breakdown: CostBreakdown | None
    missing_rates: tuple[str, ...]
    traffic: Mapping[str, Traffic] = field(hash=False)
    rooflines: Mapping[str, Roofline] = field(hash=False)
    block_intensity: float | None
    density: float
    on_chip: OnChip | None
    standard_problem: str | None
    shared: SharedAccesses | None
    measured_us: float | None

    @property
    def model_error(self) -> float | None:
        """How far the predicted time is from the measured one, as a fraction of that: 0.1 is 10 % too long."""
        if self.measured_us is None or self.breakdown is None:
            return None
        return self.breakdown.total_us / self.measured_us - 1

    @property
    def is_explained(self) -> bool:
        """Whether there is a prediction, and no measurement that it is far from."""
        if self.breakdown is None:
            return False
        return self.model_error is None or abs(self.model_error) <= TRUSTED_ERROR

    @property
    def band(self) -> Band | None:
        """The error band of predictions like this one; None where the device or the features were never measured."""
        return band_of(self.config.kernel, self.shape, self.device)

    @property
    def gives_advice(self) -> bool:
        """Whether the prediction is near a measurement of this config or, without one, has a narrow band."""
        if self.measured_us is not None:
            return self.is_explained
        return self.is_explained and self.band is not None and not self.band.doubt

    @property
    def predicted_text(self) -> str:
        """The predicted time with its band; a dash where there is none."""
        total_us = None if self.breakdown is None else self.breakdown.total_us
        return predicted_text(total_us, self.config.kernel, self.shape, self.device)

    @property
    def flops(self) -> float:
        """Of one call."""
        return self.shape.flops * self.density

    @property
    def uncached(self) -> str:
        """The name of the kernel's traffic where nothing is found in a cache."""
        return next(name for name in UNCACHED if name in self.traffic)

    @property
    def once(self) -> str:
        """The name of the kernel's traffic where L2 keeps what the blocks of a launch share."""
        return next(name for name in ONCE if name in self.traffic)

    @property
    def least_bytes(self) -> int:
        """The fewest bytes of device memory that any algorithm moves."""
        return least_bytes(self.shape)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The kernel's launches, each reading once; empty if there is one only."""
        traffic = self.traffic[self.once]
        return traffic.passes if isinstance(traffic, Passes) and len(traffic.passes) > 1 else ()

    def __str__(self) -> str:
        return f"{self.shape.label} on {self.device.name}\n{self.config.label}\n{bound_value('text_of_analysis')(self)}"

    def __repr__(self) -> str:
        """Return the analysis in words, as `print` shows it."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return a table of the times and the occupancy for a notebook, and the lanes of the units."""
        rows = {"config": self.config.label}
        if self.breakdown is not None:
            rows["predicted"] = self.predicted_text
        if self.measured_us is not None:
            rows["measured"] = f"{self.measured_us:,.1f} µs"
        if self.breakdown is not None and self.is_explained:
            rows["bound by"] = terms_of(self.shape)[self.breakdown.binding]
        limits = " and ".join(str(name).replace("_", " ") for name in self.occupied.binding)
        rows["occupancy"] = f"{counted(self.occupied.blocks_per_sm, 'block')}/SM, limited by {limits}"
        table = html_table(f"{self.shape.label} on {self.device.name}", rows)
        return f"<div>{table}{bound_value('pictures_of')(self)}</div>"

    def to_json(self) -> dict[str, Any]:
        waves = self.waves
        return {
            "device": self.device.to_json(),
            "shape": self.shape.to_json(),
            "config": self.config.to_json(),
            "occupancy": self.occupied.to_json(),
            "tensor_cores": self.occupied.resources.tensor_cores,
            "waves": waves and {"grid_blocks": waves.grid_blocks, "count": waves.count, "efficiency": waves.efficiency},
            "prediction": self._prediction_json(),
            "band": self.band and self.band.to_json(),
            "is_explained": self.is_explained,
            "gives_advice": self.gives_advice,
            "missing_rates": list(self.missing_rates),
            "traffic": {name: traffic.to_json() for name, traffic in self.traffic.items()},
            "least_bytes": self.least_bytes,
            "rooflines": {name: line.to_json() for name, line in self.rooflines.items()},
            "block_intensity": self.block_intensity,
            "density": self.density,
            "on_chip": self.on_chip and self.on_chip.to_json(),
            "standard_problem": self.standard_problem,
            "shared_accesses": self.shared and self.shared.report(),
            "measured_us": self.measured_us,
            "model_error": self.model_error,
        }

    def _prediction_json(self) -> dict[str, Any] | None:
        """Return the prediction. What binds is not known where the model is far from a measurement."""
        if self.breakdown is None:
            return None
        return self.breakdown.to_json() | ({} if self.is_explained else {"binding": None})


def analyse(
    kernel: AttentionKernel,
    config: KernelConfig,
    shape: AttentionShape,
    device: DeviceSpec,
    code: CompiledCode,
    *,
    measured_us: float | None = None,
) -> Analysis:
    """Ask every model about a compiled config.

    Args:
        kernel: whose config it is.
        config: its block sizes.
        shape: the problem.
        device: the one that it was compiled for.
        code: what the compiler made of it.
        measured_us: what it takes there, if that is known.
    """
    occupied, missing = occupancy(code.resources, device.limits), missing_rates(device)
    fits = occupied.blocks_per_sm > 0
    density = density_of(shape)
    blocks, folded = folded_forward(kernel, config, shape)
    walks_keys = shape.direction is Direction.FORWARD and not kernel.softmax_cost(config).round_trip
    traffic = _traffic(kernel, config, shape)
    lines = {} if missing else _rooflines(shape, traffic, device, density, code.resources.tensor_cores)
    return Analysis(
        device=device,
        shape=shape,
        config=config,
        occupied=occupied,
        alternatives=steps_down(kernel, config, shape, device.limits),
        lifts=lifts_of(kernel, config, shape, device.limits),
        waves=waves_of(folded, blocks.block_m, occupied, device.num_sms) if fits else None,
        breakdown=predict_launches(kernel, config, shape, device, code) if fits and not missing else None,
        shared=code.shared,
        missing_rates=missing,
        traffic=traffic,
        rooflines=lines,
        block_intensity=block_intensity(folded, blocks.block_m) if walks_keys else None,
        density=density,
        on_chip=on_chip_of(kernel, config, shape, device.limits),
        standard_problem=standard_memory_problem(shape, device),
        measured_us=measured_us,
    )


def steps_down(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits
) -> dict[str, int]:
    """Return the shared bytes of a block after one step down of one parameter, by the step's name, `num_stages 3→2`."""
    found = {}
    now = config.parameters
    for name, choices in kernel.parameters.items():
        lower = max((choice for choice in choices if choice < now[name]), default=None)
        if lower is not None:
            smaller = KernelConfig.of(config.kernel, now | {name: lower})
            found[f"{name} {now[name]}→{lower}"] = kernel.shared_bytes(smaller, shape, limits)
    return found


def measured_time_us(
    store: "ResultStore", device: DeviceSpec, shape: AttentionShape, config: KernelConfig, kernel_hash: str
) -> float | None:
    """Return what this config of this device code took on this device: in the finals if it won them, else in its
    youngest trial; None if it was never timed."""
    best = store.best(device, shape)
    if best is not None and best.origin is Origin.MEASURED and (best.config, best.kernel_hash) == (config, kernel_hash):
        return best.time_us
    trials = store.trials(device, shape, kernel_hash=kernel_hash)
    times = [trial.time_us for trial in trials if trial.config == config and trial.time_us is not None]
    return times[-1] if times else None


def _rooflines(
    shape: AttentionShape, traffic: Mapping[str, Traffic], device: DeviceSpec, density: float, instruction: str
) -> dict[str, Roofline]:
    """Return the rooflines by algorithm; standard attention is PyTorch's, whose products are not those of the code."""
    instructions = dict.fromkeys(traffic, instruction) | {"standard": library_instruction(shape.dtype)}
    return {
        name: roofline(shape, moved, device, density=density, instruction=instructions[name])
        for name, moved in traffic.items()
    }


def _traffic(kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape) -> dict[str, Traffic]:
    """Return the traffic by algorithm; the last two are the bounds between which the kernel lies."""
    backward = shape.direction is Direction.BACKWARD
    standard: dict[str, Traffic] = {
        "standard": standard_backward_traffic(shape) if backward else standard_traffic(shape)
    }
    m, n = config.block_m, config.block_n
    if is_plain_v2(kernel, shape):
        return standard | {
            "v1": v1_traffic(shape, m, n),
            "v2": v2_traffic(shape, m, n),
            "v2_perfect_l2": v2_traffic(shape, m, n, perfect_l2=True),
        }
    return standard | {
        "own": traffic_of(kernel, config, shape),
        "own_perfect_l2": traffic_of(kernel, config, shape, perfect_l2=True),
    }
