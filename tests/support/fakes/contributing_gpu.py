"""A GPU that contributes at once: it compiles, checks, studies and times without any hardware."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from blocktune.db.records.records import Environment, Outcome, Regime
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.report import Comparison, Entry, Timing
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.contribute.contribution import Instruments
from blocktune.tuner.measure.measurement import Measurement

ENVIRONMENT = Environment(triton="3.6.0", ptxas="12.8.93", torch="2.13.0", driver="580.65.06", regime=Regime.BURST)
RESOURCES = KernelResources(
    registers=128,
    spill_bytes=0,
    shared_bytes=32768,
    stack_bytes=0,
    num_warps=4,
    code_sha256="0" * 64,
    tensor_cores="mma",
)


class Wall:
    """A clock that moves when something is done."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


class ContributingGpu:
    """Does each part within its seconds. wrong: the kernels whose results are. slow: the configs that never compile."""

    def __init__(self, device: DeviceSpec, *, seconds: float = 2.0, wrong: str = "", default_us: float = 100.0) -> None:
        self.device, self.wall = device, Wall()
        self.wrong, self.seconds, self.default_us = wrong, seconds, default_us
        self.error = "relative error 1.2"
        self.unfinished: set[AttentionShape] = set()
        self.aborted: list[Future[Any]] = []
        self.with_lse: list[AttentionShape] = []
        self.shape: AttentionShape | None = None

    def instruments(self, **changes: Any) -> Instruments:
        """Return what a contribution works with."""
        parts: dict[str, Any] = {
            "compiler": self,
            "checker": self,
            "own_configs": self.own_configs,
            "study": self.study,
            "compare": self.compare,
            "now": self.wall,
        }
        return Instruments(**parts | changes)

    def own_configs(self, shape: AttentionShape) -> Mapping[str, KernelConfig | None]:
        kernels = kernels_for(shape, self.device.limits)
        default = kernels[0].default_config(shape, self.device.limits)
        return {"untuned": kernels[-1].default_config(shape, self.device.limits), "default": default, "paper": None}

    def submit(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> Future[CompileResult]:
        assert (kernel, cc) == (config.kernel, self.device.limits.cc)
        future: Future[CompileResult] = Future()
        if shape not in self.unfinished:
            future.set_result(CompileResult(config=config, outcome=Outcome.OK, resources=RESOURCES))
        return future

    def submit_with_lse(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> Future[bool]:
        assert (kernel, cc) == (config.kernel, self.device.limits.cc)
        self.with_lse.append(shape)
        future: Future[bool] = Future()
        if shape not in self.unfinished:
            future.set_result(True)
        return future

    def abort(self, future: Future[Any]) -> None:
        self.aborted.append(future)

    def turn_to(self, shape: AttentionShape) -> None:
        self.shape = shape

    def confirm(self, config: KernelConfig) -> Measurement:
        self.wall.at += self.seconds
        if config.kernel == self.wrong:
            return Measurement(outcome=Outcome.WRONG_RESULT, error=self.error)
        return Measurement(outcome=Outcome.OK)

    def study(self, shape: AttentionShape, configs: tuple[KernelConfig, ...], seconds: float) -> dict[str, Any]:
        self.wall.at += seconds
        return {"format": "blocktune-noise", "schema": 1, "shape": shape.to_json(), "configs": len(configs)}

    def compare(self, shape: AttentionShape) -> Comparison:
        self.wall.at += self.seconds
        own = self.own_configs(shape)
        entries = (
            self._entry("untuned", 90.0, own["untuned"]),
            self._entry("default", self.default_us, own["default"]),
            Entry(name="paper", problem="this rule is one of a forward whose queries fill a tile"),
            self._entry("fa2", 120.0, None),
            Entry(name="cudnn", problem=self.error),
        )
        return Comparison(shape=shape, regime=Regime.BURST, entries=entries, rounds=9, seconds=self.seconds)

    def _entry(self, name: str, median_us: float, config: KernelConfig | None) -> Entry:
        timing = Timing(
            median_us=median_us, low_us=0.98 * median_us, high_us=1.02 * median_us, tflops=1.0, over_cudnn=None
        )
        return Entry(name=name, config=config, timing=timing)
