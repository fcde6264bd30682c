"""The Hopper forward over parts of the keys: what it takes, its default, and its source on the CPU, by
tests/support/gluon/machine.py. Results of a GPU are tested in test_flash_fwd_hopper_split_gpu.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.base.direct_launch import with_descriptors
from blocktune.kernels.hopper.forward import launch as forward_launch
from blocktune.kernels.hopper.forward.device_kernel import flash_fwd_hopper_kernel
from blocktune.kernels.hopper.forward.launch import leading, leading_with_extras
from blocktune.kernels.hopper.forward.split.kernel import FlashForwardHopperSplit
from blocktune.kernels.hopper.forward.split.launch import OUT, describe_parts
from blocktune.kernels.registry import default_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.attention import feature_cases
from tests.support.attention.feature_cases import cached
from tests.support.gluon import machine as gluon_machine
from tests.support.gluon.hopper_forward import HOPPER, compare, shape_of, tensors

pytestmark = pytest.mark.triton_free

KERNEL = FlashForwardHopperSplit()
CHUNK = shape_of(512, 32768, 128, num_heads=8, num_heads_kv=1, causal=Causal.LOWER_RIGHT)
"""A chunk of a prompt after its context."""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_launch, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(feature_cases, "DEVICE", "cpu")


@pytest.fixture
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashForwardHopperSplit, "shape_problem", lambda self, shape, limits: None)


def run_parts(
    problem: AttentionShape, config: KernelConfig, qkv: list[torch.Tensor], extras: Extras = NO_EXTRAS
) -> tuple[torch.Tensor, ...]:
    """Return the outputs [batch, num_heads, splits, seqlen_q, head_dim_v] and log-sum-exps of the parts."""
    launch: Any = KERNEL.bind(config, problem)
    sizes = problem.batch, problem.num_heads * launch.parts, problem.seqlen_q
    outputs, sums = torch.full((*sizes, problem.head_dim_v), 7.0).half(), torch.full(sizes, 7.0)
    given: Any = (*qkv, outputs, sums, problem.head_dim**-0.5)
    values = leading_with_extras(problem, *(*given, extras)) if problem.features else leading(*given)
    described: list[Any] = list(with_descriptors(values, launch.described))
    described[OUT] = describe_parts(problem, launch.parts, launch.block, torch.float16, (outputs, 0))
    gluon_machine.run(flash_fwd_hopper_kernel, (*described, *launch.fixed), 2)
    shape = problem.batch, problem.num_heads, launch.parts, problem.seqlen_q
    return outputs.view(*shape, -1), sums.view(*shape)


def merged(outputs: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = sums.softmax(2).nan_to_num(0.0)
    return (weights[..., None] * outputs.float()).sum(2).half(), sums.logsumexp(2)


def config_of(problem: AttentionShape, splits: int) -> KernelConfig:
    tile = super(FlashForwardHopperSplit, KERNEL).default_config(problem, HOPPER)
    return KernelConfig.of(KERNEL.name, {**tile.parameters, "splits": splits})


@pytest.mark.few(8)
@pytest.mark.usefixtures("_of_any_size")
@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(100, 700), (64, 640), (200, 900), (190, 704), (330, 323), (400, 330)]
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_parts_merge_to_the_attention(head_dim: int, seqlen_q: int, seqlen_k: int, causal: Causal, splits: int) -> None:
    """Under a diagonal with fewer blocks than parts, and with rows that see no key."""
    problem = shape_of(seqlen_q, seqlen_k, head_dim, causal=causal, batch=2)
    tile = config_of(problem, splits)
    config = config_of(problem, min(splits, -(-seqlen_k // tile.block_n)))
    assert KERNEL.violations(config, problem, HOPPER) == ()
    qkv = tensors(problem)
    found = merged(*run_parts(problem, config, qkv))
    compare(*found, *attention_reference(*qkv, causal=causal))


@pytest.mark.few(6)
@pytest.mark.usefixtures("_of_any_size")
@pytest.mark.parametrize("features", ["cached", "cached page=16", "cached page=64", "cached softcap page=256"])
@pytest.mark.parametrize("causal", Causal)
def test_entries_of_their_own_lengths(causal: Causal, features: str) -> None:
    """Longer and shorter than the queries, fewer blocks than parts, and none at all."""
    problem = shape_of(100, 900, features=features, batch=5, causal=causal)
    qkv, extras = cached(problem, None, (900, 64, 0, 129, 333))
    extras = replace(extras, softcap=1.5 if problem.features.softcap else 0.0)
    found = merged(*run_parts(problem, config_of(problem, 4), list(qkv), extras))
    options: dict[str, Any] = {"causal": causal, "features": problem.features, "dtype": torch.float64}
    compare(*found, *attention_reference(*qkv, **options, extras=extras))


@pytest.mark.parametrize("features", ["", "cached page=16"])
def test_a_chunk_after_a_context_is_split(features: str) -> None:
    chunk = replace(CHUNK, features=Features.parse(features))
    kernel = default_kernel(chunk, HOPPER)
    assert kernel is not None
    assert kernel.name == KERNEL.name
    assert KERNEL.default_config(chunk, HOPPER).parameters["splits"] == 4  # 32 tiles on 132 multiprocessors


def test_few_heads_under_a_diagonal_are_split() -> None:
    """128 tiles, the longest of which has as many steps as two of the mean."""
    prompt = shape_of(4096, 4096, 128, num_heads=4, num_heads_kv=4, causal=Causal.UPPER_LEFT)
    assert KERNEL.unsupported(prompt, HOPPER) is None
    assert "tiles" in str(KERNEL.unsupported(replace(prompt, batch=4), HOPPER))


@pytest.mark.parametrize(
    ("changes", "word"), [({"seqlen_q": 16}, "seqlen_q"), ({"seqlen_k": 1000}, "seqlen_k"), ({"batch": 8}, "tiles")]
)
def test_other_shapes_are_left_to_the_kernel_without_parts(changes: dict[str, Any], word: str) -> None:
    assert word in str(KERNEL.unsupported(replace(CHUNK, **changes), HOPPER))


def test_parts_are_no_more_than_blocks_of_keys() -> None:
    config = KernelConfig.of(KERNEL.name, {**KERNEL.default_config(CHUNK, HOPPER).parameters, "splits": 16})
    assert KERNEL.violations(config, CHUNK, HOPPER) == ()
    assert "at most 15" in str(KERNEL.rule_violations(config, replace(CHUNK, seqlen_k=1900), HOPPER))


def test_sinks_are_left_to_a_pass_over_the_results() -> None:
    kernel: Any = KERNEL
    assert kernel.bind_with_sinks(kernel.default_config(CHUNK, HOPPER), CHUNK) is None
