"""Records to store, and the places to store them in."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from blocktune.db.records.records import Best, Environment, KernelBest, KernelTrial, Outcome, Telemetry, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.base.paper_rule import first_paper_config
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig, LaunchProblem
from tests.support.stores.new_stores import new_store
from tests.support.stores.postgres_server import EmptyDatabases, need_server, running_server

NOON = datetime(2026, 11, 20, 12, 0, 0, 123456, tzinfo=UTC)
KERNEL, SOURCE = "package.module:softmax", "0123456789abcdef"
PROBLEM = KernelProblem(KERNEL, LaunchProblem((("(types)", "fp16 fp16"), ("scale", 0.5))))
CONFIG = LaunchConfig(KERNEL, (("BLOCK", 128), ("num_warps", 4)))


@pytest.fixture(scope="session")
def device() -> DeviceSpec:
    return replace(device_named("h200"), source="driver", uuid="GPU-12345678-1234-1234-1234-123456789abc")


@pytest.fixture(scope="session")
def shape() -> AttentionShape:
    return AttentionShape(
        batch=2,
        num_heads=32,
        num_heads_kv=8,
        seqlen_q=8192,
        seqlen_k=4096,
        head_dim=64,
        head_dim_v=128,
        causal=Causal.LOWER_RIGHT,
    )


@pytest.fixture(scope="session")
def trial(device: DeviceSpec, shape: AttentionShape) -> Trial:
    """A trial with a value in every field."""
    return Trial(
        device=device,
        environment=Environment(
            triton="3.6.0",
            ptxas="12.8.93",
            torch="2.11.0",
            cuda="13.0",
            driver="580.65.06",
            protocol=2,
            power_limit_w=700,
        ),
        shape=shape,
        config=KernelConfig("flash_fwd", 128, 64, 4, 3, extra=(("swizzle", 8),)),
        kernel_hash="0123456789abcdef",
        outcome=Outcome.OK,
        resources=KernelResources(
            registers=168,
            shared_bytes=98304,
            static_shared_bytes=16,
            stack_bytes=8,
            spill_bytes=4,
            num_warps=8,
            barriers=2,
            tensor_cores="wgmma",
            code_sha256="ab" * 32,
        ),
        blocks_per_sm=2,
        occupancy=0.25,
        limiters=("registers", "shared_memory"),
        predicted_us=101.25,
        time_us=99.5,
        relative_to_anchor=0.98,
        samples_us=(99.0, 99.5, 100.1),
        error="",
        compile_seconds=1.5,
        bench_seconds=0.25,
        telemetry=Telemetry(
            sm_clock_mhz=1980,
            memory_clock_mhz=3201,
            temperature_c=45,
            power_w=612.5,
            throttle_reasons=1 << 40,
            other_processes=0,
        ),
        created_at=NOON,
    )


@pytest.fixture(scope="session")
def best(trial: Trial) -> Best:
    """A winner with a value in every field, compared with what the kernels have."""
    return compared(
        Best(
            device=trial.device,
            environment=trial.environment,
            shape=trial.shape,
            config=trial.config,
            kernel_hash=trial.kernel_hash,
            origin=Origin.MEASURED,
            time_us=99.5,
            predicted_us=101.25,
            default_time_us=120.5,
            paper_time_us=150.0,
            speedup_over_default=1.21,
            speedup_low=1.2,
            speedup_high=1.22,
            trials=120,
            created_at=NOON,
        )
    )


def compared(best: Best) -> Best:
    """The winner with the default and FlashAttention's heuristic that its shape has today."""
    limits = best.device.limits
    kernels = kernels_for(best.shape, limits)
    default = kernels[0].default_config(best.shape, limits)
    return replace(best, default=default, paper=first_paper_config(kernels, best.shape, limits))


@pytest.fixture(scope="session")
def kernel_trial(trial: Trial) -> KernelTrial:
    """A trial of an autotuned kernel with a value in every field."""
    values = {field.name: getattr(trial, field.name) for field in fields(trial)}
    return Trial(**values | {"shape": PROBLEM, "config": CONFIG, "kernel_hash": SOURCE, "energy_mj": 2.5})


@pytest.fixture(scope="session")
def kernel_best(kernel_trial: KernelTrial) -> KernelBest:
    return Best(
        device=kernel_trial.device,
        environment=kernel_trial.environment,
        shape=PROBLEM,
        config=CONFIG,
        kernel_hash=SOURCE,
        origin=Origin.MEASURED,
        time_us=12.5,
        default=LaunchConfig(KERNEL, (("BLOCK", 256), ("num_warps", 8))),
        default_time_us=14.0,
        speedup_over_default=1.12,
        speedup_low=1.1,
        speedup_high=1.13,
        trials=8,
        created_at=kernel_trial.created_at,
    )


@pytest.fixture
def bests(best: Best) -> list[Best]:
    """Winners of five lengths, each measured a minute after the one before."""
    lengths = (512, 1024, 2048, 4096, 8192)
    return [
        compared(
            replace(
                best,
                shape=replace(best.shape, seqlen_q=length, seqlen_k=length),
                created_at=NOON + timedelta(minutes=index),
            )
        )
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="session")
def postgres_databases() -> Iterator[EmptyDatabases]:
    """Empty databases of a real server that lives as long as the session."""
    need_server()
    with running_server() as server:
        yield EmptyDatabases(server)


@pytest.fixture(scope="session")
def new_postgres_database(postgres_databases: EmptyDatabases) -> Callable[[], str]:
    """Makes a database that no other test gets."""
    return postgres_databases.new


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place for a new store: a file, and a database of a PostgreSQL server where there is one."""
    if request.param == "sqlite":
        (tmp_path / "store").mkdir()
        yield str(tmp_path / "store" / "blocktune.db")
    else:
        with request.getfixturevalue("postgres_databases").one() as url:
            yield url


@pytest.fixture
def store(target: str) -> Iterator[ResultStore]:
    if "://" not in target:
        new_store(Path(target))
    with ResultStore.open(target) as opened:
        yield opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a new SQLite store may be put."""
    return tmp_path / "blocktune.db"


@pytest.fixture
def sqlite_store(path: Path) -> Iterator[ResultStore]:
    with ResultStore.open(new_store(path)) as opened:
        yield opened
