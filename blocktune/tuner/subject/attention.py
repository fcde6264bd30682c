"""An attention shape as a subject, and the farm that compiles its configs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from blocktune.db.records.records import Best, Environment
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.candidates.starting_configs import expected_config, find_contenders, near_rows
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile_server.background import PreparingCompiler
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.cost.roofline import missing_rates
from blocktune.tuner.subject.subject import Subject


@dataclass(frozen=True, kw_only=True)
class AttentionSubject(Subject[AttentionShape, KernelConfig]):
    """An attention shape. kernels: those that take part, by name. near: winners of shapes like this one."""

    device: DeviceSpec
    environment: Environment
    shape: AttentionShape
    kernels: Mapping[str, AttentionKernel]
    contenders: Contenders
    near: tuple[TunedConfig, ...] = ()

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        device: DeviceSpec,
        environment: Environment,
        kernels: Sequence[AttentionKernel],
        nearest: Iterable[Best] = (),
        *,
        exhaustive: bool = False,
    ) -> "AttentionSubject":
        """Return the subject of a search among some kernels; nearest: stored winners of shapes like this one;
        exhaustive: whether configs that are certainly slow take part.

        Raises:
            NoFeasibleConfigError: no kernel computes the shape on this device, or every config breaks a rule.
        """
        near = tuple(nearest)
        contenders = find_contenders(shape, device, kernels, near, exhaustive=exhaustive)
        named = dict.fromkeys(config.kernel for config in contenders.space.feasible)
        return cls(
            device=device,
            environment=environment,
            shape=shape,
            kernels={name: get_kernel(name) for name in named},
            contenders=contenders,
            near=near_rows(near, shape),
        )

    @property
    def problem(self) -> AttentionShape:
        return self.shape

    def source_hash(self, config: KernelConfig) -> str | None:
        kernel = self.kernels.get(config.kernel)
        return None if kernel is None else kernel.source_hash

    def usefulness(self, config: KernelConfig) -> float:
        return usefulness(self.kernels[config.kernel], config, self.shape, self.device)

    def predict(self, compiled: CompileResult[KernelConfig]) -> float | None:
        if compiled.code is None or missing_rates(self.device):
            return None  # without rates only for a present device: it is measured all the same
        kernel, config = self.kernels[compiled.config.kernel], compiled.config
        return predict_us(kernel, config, self.shape, self.device, compiled.code)

    def expected(self, predicted_us: Mapping[KernelConfig, float]) -> KernelConfig | None:
        return expected_config(predicted_us, self.shape, self.device, self.near)

    def launches_alike(self, config: KernelConfig, other: KernelConfig) -> bool:
        """Return whether only the number of stages differs: all else may also decide how the code is launched."""
        return dataclasses.replace(config, num_stages=other.num_stages) == other


@dataclass(frozen=True, slots=True)
class ShapeCompiler:
    """Compiles configs of one shape by a farm, which may serve other shapes too; see `PreparingConfigCompiler`."""

    farm: PreparingCompiler
    shape: AttentionShape
    cc: tuple[int, int]

    def submit(self, config: KernelConfig) -> "Future[CompileResult]":
        """Compile a config."""
        return self.farm.submit(config.kernel, config, self.shape, self.cc)

    def start(self) -> None:
        """Start the farm's process."""
        self.farm.start()

    def submit_confirmation(self, config: KernelConfig) -> None:
        """Compile the launch that also writes the log-sum-exp, which the last check of a winner makes."""
        self.farm.submit_with_lse(config.kernel, config, self.shape, self.cc)
