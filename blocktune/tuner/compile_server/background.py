"""The protocol of what compiles in the background: the farm, or a stand-in for it."""

from concurrent.futures import Future
from typing import Protocol

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import CompileResult


class Compiler(Protocol):
    """Compiles configs in the background."""

    def submit(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[CompileResult]": ...


class PreparingCompiler(Compiler, Protocol):
    """Starts before there is work, and compiles what later launches need besides a config's own code."""

    def start(self) -> None: ...

    def submit_with_lse(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[bool]": ...
