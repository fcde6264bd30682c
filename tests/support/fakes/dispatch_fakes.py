"""A kernel without a GPU, the device it runs on, and stores that recommend configs for it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from blocktune.db.records.records import Best, Environment
from blocktune.db.store import ResultStore
from blocktune.kernels import registry
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, Launch
from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec, device_named
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.dispatch import dispatcher, obstacles, resolver
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention
from blocktune.runtime.store_reader.provenance import Reuse, ptxas_version, triton_version
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from tests.support.stores.new_stores import new_store

H200 = device_named("h200")


class PlainKernel(AttentionKernel):
    """Attention by PyTorch behind the interface of a kernel. It counts its launches by config.

    Configs with block_m 1024 do not fit any device; those in `broken` fit and raise when they are launched.
    """

    name: ClassVar[str] = "plain"
    parameters: ClassVar[dict[str, tuple[int, ...]]] = {
        "block_m": (64, 128, 1024),
        "block_n": (32, 64),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
    }

    def __init__(self) -> None:
        self.launched: list[KernelConfig] = []
        self.broken: set[KernelConfig] = set()

    @property
    def source_hash(self) -> str:
        return "00000000feedbeef"

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        return None if shape.head_dim <= 128 else f"`head_dim <= 128` must hold, but got {shape.head_dim}."

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        return ()

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return config.block_m * 1024

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        return KernelConfig("plain", 64, 32, 4, 2)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        raise NotImplementedError("the dispatcher compiles nothing offline")

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
            if config in self.broken:
                raise RuntimeError("out of resource: shared memory")
            self.launched.append(config)
            causal = shape.causal is Causal.UPPER_LEFT
            out.copy_(scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True))
            if lse is not None:
                lse.copy_(attention_reference(q, k, v, causal=shape.causal, scale=scale)[1])

        return launch


def pretend_h200(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    """The CPU as an H200 with one kernel, which is returned."""
    kernel = PlainKernel()
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel})
    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(dispatcher, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    monkeypatch.setattr(resolver, "CALL_SECONDS", 20.0)  # so that what a call finds does not hang on other programs
    return kernel


def config(block_m: int = 128, num_warps: int = 8) -> KernelConfig:
    return KernelConfig("plain", block_m, 64, num_warps, 3)


def shape_like(seqlen: int = 128, **changes: Any) -> AttentionShape:
    sizes: dict[str, Any] = {
        "batch": 1,
        "num_heads": 4,
        "num_heads_kv": 4,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "head_dim": 64,
        "head_dim_v": changes.get("head_dim", 64),
        "dtype": "float32",
    }
    return AttentionShape(**sizes | changes)


def tensors(shape: AttentionShape, *, layout: str = "bhsd") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key and value of this shape; layout `bshd` stores them [batch, length, heads, head_dim]."""

    def tensor(heads: int, length: int, dim: int) -> torch.Tensor:
        sizes = (shape.batch, heads, length, dim) if layout == "bhsd" else (shape.batch, length, heads, dim)
        made = torch.randn(sizes, dtype=getattr(torch, shape.dtype))
        return made if layout == "bhsd" else made.transpose(1, 2)

    return (
        tensor(shape.num_heads, shape.seqlen_q, shape.head_dim),
        tensor(shape.num_heads_kv, shape.seqlen_k, shape.head_dim),
        tensor(shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v),
    )


class ListSource:
    """A source that counts how often it is read."""

    def __init__(self, rows: Iterable[TunedConfig] = ()) -> None:
        self.rows = list(rows)
        self.reads = 0

    def configs(self, device: DeviceSpec) -> list[TunedConfig]:
        self.reads += 1
        return self.rows


class BrokenSource:
    """A source that cannot be read."""

    def configs(self, device: DeviceSpec) -> list[TunedConfig]:
        raise OSError("no such disk")


def tuned(
    shape: AttentionShape,
    config: KernelConfig,
    origin: Origin = Origin.MEASURED,
    reuse: Reuse | None = None,
) -> TunedConfig:
    time_us = 10.0 if origin is Origin.MEASURED else None
    return TunedConfig(shape=shape, config=config, origin=origin, time_us=time_us, reuse=reuse)


def best(
    shape: AttentionShape,
    config: KernelConfig,
    *,
    device: DeviceSpec = H200,
    origin: Origin = Origin.MEASURED,
    kernel_hash: str = "00000000feedbeef",
    triton: str | None = None,
    ptxas: str | None = None,
    driver: str = "",
    power_limit_w: int = 0,
) -> Best:
    environment = Environment(
        triton=triton or triton_version(),
        ptxas=ptxas or ptxas_version(90),
        torch="2.11.0",
        driver=driver,
        power_limit_w=power_limit_w,
    )
    return Best(
        device=device,
        environment=environment,
        shape=shape,
        config=config,
        kernel_hash=kernel_hash,
        origin=origin,
        time_us=10.0 if origin is Origin.MEASURED else None,
    )


def store_with(path: Path, *bests: Best) -> Path:
    """A store file with these winners, closed."""
    with ResultStore.open(new_store(path)) as store:
        for one in bests:
            store.set_best(one)
    return path
