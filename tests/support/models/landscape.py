"""A synthetic tuning problem: kernels, a compiler and times that need neither Triton nor a GPU."""

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from blocktune.db.records.records import Environment, Outcome
from blocktune.kernels import registry
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader import sources
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.subject.attention import AttentionSubject
from tests.support.fakes.fake_kernels import FakeKernel

SHAPE = AttentionShape(batch=2, num_heads=32, num_heads_kv=32, seqlen_q=8192, seqlen_k=8192, head_dim=64, head_dim_v=64)
DEVICE: DeviceSpec = dataclasses.replace(device_named("h200"), source="driver")
ROUNDS = 9


class LandscapeKernel(FakeKernel):
    """A kernel with as many choices as the real ones have; it is never run."""

    parameters = {  # noqa: RUF012, as in the kernels
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (16, 32, 64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
    }


KERNELS = {name: LandscapeKernel(name) for name in ("pointers", "descriptors")}
SPACE = SearchSpace.build(SHAPE, DEVICE.limits, KERNELS.values())
DEFAULT = KERNELS["pointers"].default_config(SHAPE, DEVICE.limits)
SUBJECT = AttentionSubject(
    device=DEVICE,
    environment=Environment(triton="3.6.0", ptxas="12.8", torch="2.11"),
    shape=SHAPE,
    kernels=KERNELS,
    contenders=Contenders(space=SPACE, expected=(DEFAULT,), default=DEFAULT, paper=None, neighbours=()),
)


def replace_kernels() -> None:
    """Let this process know no other kernels, and no shipped results, which are of others."""
    registry.KERNELS.clear()
    registry.KERNELS.update(KERNELS)
    sources.shipped_rows = lambda: iter(())


@contextmanager
def registered() -> Iterator[None]:
    """Have the landscape's kernels in the registry, and no others."""
    saved = dict(registry.KERNELS)
    registry.KERNELS.clear()
    registry.KERNELS.update(KERNELS)
    try:
        yield
    finally:
        registry.KERNELS.clear()
        registry.KERNELS.update(saved)


def _noise(config: KernelConfig, salt: int) -> float:
    """A fixed number in 0..1 for a config."""
    digest = hashlib.sha256(f"{salt} {config.label}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def resources_of(config: KernelConfig) -> KernelResources | None:
    """What the fake compiler finds; None is a compile error, which nothing in the config announces, as nothing does
    where the code turns out to need more shared memory than there is."""
    if _noise(config, -1) < 0.03:
        return None
    hidden_bytes = 230_000 if _noise(config, -4) < 0.03 else 0
    per_thread = (config.block_m * 64 + config.block_m * config.block_n) // (32 * config.num_warps)
    return KernelResources(
        registers=min(255, 40 + per_thread),
        shared_bytes=KERNELS["pointers"].shared_bytes(config, SHAPE, DEVICE.limits) + hidden_bytes,
        spill_bytes=max(0, 4 * (per_thread - 215)),
        num_warps=config.num_warps,
        tensor_cores="wgmma",
        code_sha256=hashlib.sha256(config.label.encode()).hexdigest(),
    )


def best_time_us(salt: int) -> float:
    """The fastest config that compiles, fits and is right."""
    return min(
        measured.time_us
        for config, measured in measurements(salt).items()
        if measured.time_us is not None and fits(config)
    )


def fits(config: KernelConfig) -> bool:
    resources = resources_of(config)
    return resources is not None and occupancy(resources, DEVICE.limits).blocks_per_sm > 0


def time_us(config: KernelConfig, salt: int) -> float:
    """A bowl with interactions, a cliff where registers spill, and roughness; its bottom moves with the salt."""
    m, n, warps = math.log2(config.block_m), math.log2(config.block_n), math.log2(config.num_warps)
    best_m, best_n = 6 + salt % 2, 5 + salt // 2 % 3
    bowl = 0.10 * (m - best_m) ** 2 + 0.06 * (n - best_n) ** 2 + 0.08 * (m - warps - 4.5) ** 2
    pipeline = 0.05 * (config.num_stages - 3) ** 2 + 0.03 * (n - 6) * (config.num_stages - 3)
    resources = resources_of(config)
    spills = 0.3 if resources is not None and resources.spill_bytes else 0.0
    kernel = 0.06 if config.kernel == "pointers" else 0.02 * abs(m - 7)
    return 2000.0 * (1 + bowl + max(0.0, pipeline) + spills + kernel + 0.02 * _noise(config, salt))


def measurement(config: KernelConfig, salt: int) -> Measurement:
    """The config's measurement against the default, or a wrong result for some."""
    if _noise(config, -2) < 0.03:
        return Measurement(outcome=Outcome.WRONG_RESULT, error="relative error 1.0e-01", seconds=0.1)
    anchor = time_us(KERNELS["pointers"].default_config(SHAPE, DEVICE.limits), salt)
    time = time_us(config, salt)
    samples = tuple(time * (1 + 0.002 * (_noise(config, 100 + index) - 0.5)) for index in range(ROUNDS))
    return Measurement(
        outcome=Outcome.OK,
        time_us=sorted(samples)[ROUNDS // 2],
        relative_to_anchor=time / anchor,
        samples_us=samples,
        seconds=0.1,
    )


def measurements(salt: int) -> dict[KernelConfig, Measurement]:
    """What a replay needs: every config of the space."""
    return {config: measurement(config, salt) for config in SPACE.feasible}


class InstantCompiler:
    """Compiles at once. submitted: what was asked for, in order. confirming: what is compiled with log-sum-exp."""

    def __init__(self) -> None:
        self.submitted: list[KernelConfig] = []
        self.confirming: list[KernelConfig] = []
        self.started = False

    def start(self) -> None:
        self.started = True

    def submit(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[CompileResult]":
        assert (kernel, shape, cc) == (config.kernel, SHAPE, (9, 0))
        self.submitted.append(config)
        future: Future[CompileResult] = Future()
        future.set_result(self.compiled(config))
        return future

    def submit_with_lse(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[bool]":
        assert kernel == config.kernel
        self.confirming.append(config)
        return Future()

    def compiled(self, config: KernelConfig) -> CompileResult:
        resources = resources_of(config)
        outcome = Outcome.COMPILE_ERROR if resources is None else Outcome.OK
        error = "" if resources is not None else "PassManager::run failed"
        return CompileResult(config=config, outcome=outcome, resources=resources, error=error, seconds=0.5)
