"""Results of the Hopper forward over parts of the keys on a GPU.

A kernel that hangs blocks its process for good: the timeouts kill it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hopper.forward.split.kernel import FlashForwardHopperSplit
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import Causal
from tests.kernels.hopper.forward.test_flash_fwd_hopper_gpu import (
    HOPPER,
    check,
    compare,
    results,
    run,
    shape_of,
    tensors,
)
from tests.support.attention.feature_cases import cached
from tests.support.hopper_gpu import skip_elsewhere

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]
KERNEL = FlashForwardHopperSplit()


@pytest.fixture(autouse=True)
def _hopper_alone() -> None:
    skip_elsewhere(KERNEL)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 136, 192, 256])
def test_default_parts(head_dim: int, dtype: str) -> None:
    for layout in ("bhsd", "bshd"):
        check(shape_of(300, 7000, head_dim, dtype=dtype), layout, kernel=KERNEL)
        check(shape_of(130, 5000, head_dim, dtype=dtype, causal=Causal.LOWER_RIGHT), layout, kernel=KERNEL)


@pytest.mark.parametrize("splits", KERNEL.parameters["splits"])
def test_every_number_of_parts(splits: int) -> None:
    for head_dim in (64, 128):
        for causal in (Causal.NONE, Causal.LOWER_RIGHT):
            problem = shape_of(257, 4099, head_dim, causal=causal, dtype="bfloat16")
            default = KERNEL.default_config(problem, HOPPER)
            check(problem, config=KernelConfig.of(KERNEL.name, {**default.parameters, "splits": splits}), kernel=KERNEL)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_few_heads_under_a_diagonal(head_dim: int) -> None:
    for seqlen in (2048, 3001, 4096):
        for causal in (Causal.UPPER_LEFT, Causal.LOWER_RIGHT):
            check(shape_of(seqlen, seqlen, head_dim, batch=1, causal=causal, dtype="bfloat16"), kernel=KERNEL)


@pytest.mark.parametrize("features", ["cached", "cached page=16", "cached page=64", "cached softcap page=256"])
@pytest.mark.parametrize("causal", Causal)
def test_entries_of_their_own_lengths(causal: Causal, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer and shorter than the queries, fewer blocks than parts, and none at all."""
    monkeypatch.setattr(FlashForwardHopperSplit, "shape_problem", lambda self, shape, limits: None)
    problem = shape_of(100, 4000, 128, features, batch=5, causal=causal, dtype="float16")
    qkv, extras = cached(problem, None, (4000, 64, 0, 129, 333))
    extras = replace(extras, softcap=1.5 if problem.features.softcap else 0.0)
    found = run(problem, qkv, extras, kernel=KERNEL)
    options: dict[str, Any] = {"features": problem.features, "extras": extras, "dtype": torch.float64}
    compare(problem, found, attention_reference(*qkv, causal=causal, **options))


def test_a_captured_launch_replays() -> None:
    problem = shape_of(300, 7000, 128, dtype="bfloat16")
    qkv = tensors(problem)
    expected, _ = results(problem, qkv[0])
    KERNEL.bind(KERNEL.default_config(problem, HOPPER), problem)(*qkv, expected, None, 0.1)
    out, lse = results(problem, qkv[0])
    launch = KERNEL.bind(KERNEL.default_config(problem, HOPPER), problem).pinned(*qkv, out, lse, 0.1)  # type: ignore[attr-defined]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*qkv, out, lse, 0.1)
    for _ in range(3):
        out.fill_(7.0)
        graph.replay()
        assert torch.equal(out, expected)
