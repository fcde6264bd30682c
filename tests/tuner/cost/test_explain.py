"""`blocktune.explain`: which config it explains, and what it refuses."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from blocktune import AttentionShape, Causal, Explanation, KernelConfig, explain
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.compile_server.one_config import compile_config
from blocktune.tuner.cost.analysis import analyse
from blocktune.tuner.cost.text import text_of_analysis
from blocktune.tuner.occupancy.compiled_code import CompiledCode

SHAPE = AttentionShape(batch=2, num_heads=32, seqlen_q=8192, head_dim=64, causal=Causal.UPPER_LEFT)
H200 = device_named("h200")
KERNEL = get_kernel("flash_fwd")
CONFIG = KERNEL.default_config(SHAPE, H200.limits)
RESOURCES = KernelResources(registers=168, shared_bytes=57_344, num_warps=4, tensor_cores="wgmma")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelConfig]]:
    """Compiles are replaced by fixed resources; the configs are kept."""
    configs: list[KernelConfig] = []

    def compiled_(config: KernelConfig, *_: object) -> CompiledCode:
        configs.append(config)
        return CompiledCode(RESOURCES, None)

    monkeypatch.setattr("blocktune.tuner.cost.explain.compile_config", compiled_)
    return configs


def answer_with(monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
    """Lets the dispatcher answer with this explanation."""
    found = Explanation(reason="as the test says", **fields)  # type: ignore[arg-type]
    monkeypatch.setattr("blocktune.tuner.cost.explain.best_config", lambda shape, device: found)


def test_a_given_config_is_analysed(asked: list[KernelConfig]) -> None:
    assert explain(SHAPE, CONFIG, device="h200") == analyse(KERNEL, CONFIG, SHAPE, H200, CompiledCode(RESOURCES, None))
    assert asked == [CONFIG]


@pytest.mark.parametrize(("rung", "measured_us"), [(Rung.EXACT, 1690.0), (Rung.OTHER_SOURCE, None)])
def test_without_one_it_is_that_of_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch, asked: list[KernelConfig], rung: Rung, measured_us: float | None
) -> None:
    answer_with(monkeypatch, rung=rung, config=CONFIG, time_us=1690.0)
    found = explain(SHAPE, device=H200)
    assert (found.config, found.measured_us) == (CONFIG, measured_us)


def test_a_shape_that_no_kernel_computes_has_no_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, rung=Rung.SDPA)
    with pytest.raises(NoFeasibleConfigError, match="PyTorch's scaled_dot_product_attention would"):
        explain(SHAPE, device="h200")


def test_a_config_that_breaks_a_rule_is_refused_before_it_is_compiled(asked: list[KernelConfig]) -> None:
    with pytest.raises(UsageError, match="block_m"):
        explain(SHAPE, replace(CONFIG, block_m=48), device="h200")
    hopper = get_kernel("flash_fwd_hopper").default_config(SHAPE, H200.limits)
    with pytest.raises(UsageError, match="flash_fwd_hopper"):
        explain(SHAPE, hopper, device="a100_sxm4_80")
    assert asked == []


def test_print_says_it_in_words(asked: list[KernelConfig]) -> None:
    found = explain(SHAPE, CONFIG, device="h200")
    assert str(found) == f"{SHAPE.label} on NVIDIA H200\n{CONFIG.label}\n{text_of_analysis(found)}"


def test_one_config_is_compiled_without_a_gpu() -> None:
    resources = compile_config(CONFIG, SHAPE, H200.limits).resources
    assert resources.tensor_cores == "wgmma"
    assert 0 < resources.registers <= 255


def test_a_config_that_does_not_compile_says_why() -> None:
    impossible = replace(CONFIG, block_m=48)
    with pytest.raises(NoFeasibleConfigError, match=r"does not compile for compute capability 9\.0"):
        compile_config(impossible, SHAPE, H200.limits)
