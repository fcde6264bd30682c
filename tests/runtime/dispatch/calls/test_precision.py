"""float32 products are as exact as PyTorch's settings ask for, in every plan and at every time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from blocktune.kernels import registry
from blocktune.kernels.base.kernel import CompileSpec, Launch
from blocktune.kernels.base.precision import allows_tf32, product_precision
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.dispatch import fast_path, resolver
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from tests.support.fakes.dispatch_fakes import ListSource, PlainKernel, pretend_h200

pytestmark = pytest.mark.triton_free

AMPERE = limits_for((8, 0))
NAMES = ("tf32", "tf32x3")


def by_level(level: str) -> None:
    torch.set_float32_matmul_precision(level)


def by_flag(level: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = level == "high"


def by_name(level: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if level == "high" else "ieee"


SETTERS: list[Callable[[str], None]] = [by_level, by_flag, by_name]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("ask", SETTERS)
def test_each_of_pytorchs_settings_decides(ask: Callable[[str], None]) -> None:
    for level, precision in (("highest", "tf32x3"), ("high", "tf32"), ("highest", "tf32x3")):
        ask(level)
        assert allows_tf32() is (level == "high")
        assert product_precision("float32") == precision
        assert product_precision("bfloat16") == "tf32"


class PreciseKernel(PlainKernel):
    """It writes down how exactly it was to multiply when it was bound."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        precision, launch = product_precision(shape.dtype), super().bind(config, shape)

        def counted(*arguments: object) -> None:
            self.used.append(precision)
            launch(*arguments)

        return counted


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PreciseKernel:
    pretend_h200(monkeypatch)
    precise = PreciseKernel()
    monkeypatch.setattr(registry, "KERNELS", {precise.name: precise})
    assert resolver.get_kernel(precise.name) is precise
    return precise


@pytest.mark.parametrize("ask", SETTERS)
def test_a_plan_serves_no_call_that_wants_another_precision(kernel: PreciseKernel, ask: Callable[[str], None]) -> None:
    dispatcher, tensors = Dispatcher(ListSource()), [torch.randn(1, 4, 32, 64) for _ in range(3)]
    for level, precision in (("highest", "tf32x3"), ("high", "tf32")) * 3:
        ask(level)
        for _ in range(3):  # resolved, looked up, taken the short way
            dispatcher(*tensors)
            assert kernel.used[-1] == precision
    assert len(dispatcher.resolver.plans) == 2


def test_plans_of_16_bits_know_nothing_of_it(kernel: PreciseKernel) -> None:
    dispatcher, tensors = Dispatcher(ListSource()), [torch.randn(1, 4, 32, 64).half() for _ in range(3)]
    for level in ("highest", "high") * 2:
        by_level(level)
        dispatcher(*tensors)
    assert len(dispatcher.resolver.plans) == 1


@pytest.mark.parametrize(("dtype", "asks"), [(torch.float16, False), (torch.float32, True)])
def test_the_short_way_asks_only_for_float32(
    kernel: PreciseKernel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, asks: bool
) -> None:
    dispatcher, tensors = Dispatcher(ListSource()), [torch.randn(1, 4, 32, 64).to(dtype) for _ in range(3)]
    asked: list[bool] = []
    monkeypatch.setattr(fast_path, "allows_tf32", lambda: bool(asked.append(True)))
    for _ in range(2):
        dispatcher(*tensors)
    asked.clear()
    dispatcher(*tensors)
    assert bool(asked) is asks


def of_dtype(dtype: str, direction: Direction = Direction.FORWARD) -> AttentionShape:
    return AttentionShape(
        batch=1, num_heads=2, num_heads_kv=2, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64, dtype=dtype,
        direction=direction,
    )  # fmt: skip


def specs_of(name: str, shape: AttentionShape) -> tuple[CompileSpec, ...]:
    kernel = KERNELS[name]
    config = kernel.default_config(shape, AMPERE)
    return (*kernel.further_specs(config, shape), kernel.compile_spec(config, shape))


def precisions(specs: tuple[CompileSpec, ...]) -> set[Any]:
    """The precisions of products that are compiled in, in a struct of constants or by itself."""
    constants = [value for spec in specs for value in spec.constexprs.values()]
    parts = [part for value in constants for part in (value if isinstance(value, tuple) else (value,))]
    return {part for part in parts if part in NAMES}


@pytest.mark.parametrize("name", ["flash_fwd", "flash_fwd_general", "flash_v1"])
@pytest.mark.parametrize(("level", "precision"), [("highest", "tf32x3"), ("high", "tf32"), ("medium", "tf32")])
def test_forwards_are_compiled_for_it(name: str, level: str, precision: str) -> None:
    torch.set_float32_matmul_precision(level)
    shape = of_dtype("float32", KERNELS[name].direction)
    assert precisions(specs_of(name, shape)) == {precision}


@pytest.mark.parametrize("name", ["flash_bwd_split", "flash_bwd_fused", "flash_bwd_sparse"])
@pytest.mark.parametrize("level", ["highest", "high", "medium"])
def test_gradients_always_take_three_products(name: str, level: str) -> None:
    torch.set_float32_matmul_precision(level)
    assert precisions(specs_of(name, of_dtype("float32", Direction.BACKWARD))) == {"tf32x3"}


@pytest.mark.parametrize("name", ["flash_fwd", "flash_bwd_split"])
def test_what_is_compiled_for_16_bits_is_the_same(name: str) -> None:
    shape = of_dtype("float16", KERNELS[name].direction)
    before = specs_of(name, shape)
    torch.set_float32_matmul_precision("high")
    assert specs_of(name, shape) == before
