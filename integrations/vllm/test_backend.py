"""The back-end under the installed vLLM: its interface, what it serves, and what it leaves to its parent.

The numbers are those of the portable kernels in Triton's interpreter: TRITON_INTERPRET=1.
"""

import inspect
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.dispatch import obstacles, resolver
from tests.runtime.api.test_paged_batch import DIM, HEADS, HEADS_KV, KEYS, PAGES, QUERIES, SINKS, defined, table_of
from tests.support.triton_modes import INTERPRETED

theirs = pytest.importorskip("vllm.v1.attention.backends.flash_attn", reason="vLLM is not installed")
ours = import_module("blocktune_vllm.backend")
PAIRS = [
    (ours.BlocktuneBackend, theirs.FlashAttentionBackend),
    (ours.BlocktuneImpl, theirs.FlashAttentionImpl),
    (ours.BlocktuneMetadataBuilder, theirs.FlashAttentionMetadataBuilder),
]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels run in Triton's interpreter")


@pytest.mark.parametrize(("own", "parent"), PAIRS)
def test_methods_take_what_those_of_the_parent_take(own: type, parent: type) -> None:
    methods = {name: method for name, method in vars(own).items() if callable(method) and not name.startswith("_")}
    for name, method in methods.items():
        kinds = [
            [(each.name, each.kind, each.default) for each in inspect.signature(found).parameters.values()]
            for found in (method, inspect.getattr_static(parent, name))
        ]
        assert kinds[0] == kinds[1], name


def test_the_plugin_stands_where_flash_attention_does() -> None:
    registry = import_module("vllm.v1.attention.backends.registry")
    entries = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["project"]["entry-points"]
    module, name = entries[import_module("vllm.plugins").DEFAULT_PLUGINS_GROUP]["blocktune"].split(":")
    getattr(import_module(module), name)()
    backend = registry.AttentionBackendEnum.FLASH_ATTN
    try:
        assert backend.get_class() is ours.BlocktuneBackend
        assert ours.BlocktuneBackend.get_name() == backend.name
        assert ours.BlocktuneBackend.get_impl_cls() is ours.BlocktuneImpl
    finally:
        backend.clear_override()


@pytest.mark.parametrize(
    ("queries", "singles"), [((1, 1, 40, 3), 2), ((1, 1), 2), ((5, 1), 0), ((2, 2), 0), ((1, 0, 4), 0)]
)
def test_a_step_counts_its_single_queries(
    queries: tuple[int, ...], singles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(queries, KEYS[: len(queries)], table_of(16, KEYS[: len(queries)]), 0)
    names = {"num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens", "slot_mapping"}
    common = import_module("vllm.v1.attention.backend").CommonAttentionMetadata(
        query_start_loc_cpu=step.query_start_loc,
        num_reqs=len(queries),
        block_table_tensor=step.block_table,
        **{name: getattr(step, name) for name in names},
    )
    plain = theirs.FlashAttentionMetadata(
        **{each.name: getattr(step, each.name) for each in fields(theirs.FlashAttentionMetadata)}
    )
    monkeypatch.setattr(theirs.FlashAttentionMetadataBuilder, "build", lambda *arguments: plain)
    builder = object.__new__(ours.BlocktuneMetadataBuilder)
    found = builder.build(0, common)
    assert found.singles == singles
    assert vars(found) == vars(plain) | {"singles": singles}


def step_of(queries: tuple[int, ...], keys: tuple[int, ...], table: Tensor, singles: int, **others: Any) -> Any:
    return ours.BlocktuneMetadata(
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        max_seq_len=max(keys),
        seq_lens=torch.tensor(keys, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
        singles=singles,
        **others,
    )


def layer_of(**options: Any) -> Any:
    given: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "sinks": None}
    given |= options
    sinks = given.pop("sinks")
    layer = ours.BlocktuneImpl(HEADS, DIM, DIM**-0.5, HEADS_KV, **given)
    layer.vllm_flash_attn_version = 3  # there is none on a CPU
    if sinks is not None:  # its constructor asks the kernels that are not there
        layer._attention = type(layer._attention)(scale=DIM**-0.5, sinks=sinks)
    return layer


@pytest.fixture
def parents_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(theirs.FlashAttentionImpl, "forward", lambda self, *arguments: calls.append(arguments))
    return calls


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: device_named("h200"))


@interpreted
@pytest.mark.usefixtures("kernels_on_the_cpu")
@pytest.mark.parametrize("layout", ["heads first", "rows first"])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 7, "logits_soft_cap": 2.0}, {"sinks": SINKS}],
    ids=["plain", "window, soft cap", "sinks"],
)
def test_a_mixed_step_is_attention_of_each_request(
    options: dict[str, Any], layout: str, parents_calls: list[Any]
) -> None:
    torch.manual_seed(0)
    layer, table = layer_of(**options), table_of(16, KEYS)
    cache = torch.randn(PAGES, HEADS_KV, 16, 2 * DIM, dtype=torch.float16)
    if layout == "rows first":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    query = torch.randn(sum(QUERIES) + 3, HEADS, DIM, dtype=torch.float16)  # three rows of padding
    output = torch.full_like(query, float("nan"))
    with torch.inference_mode():
        step = step_of(QUERIES, KEYS, table, 2)
        found = layer.forward(SimpleNamespace(), query, query, query, cache, step, output)
    assert found is output
    assert parents_calls == []
    for begin, queries, keys, pages in zip((0, 1, 2, 42), QUERIES, KEYS, table, strict=True):
        rows = cache[pages.clamp(min=0).long()].transpose(1, 2).flatten(0, 1)[:keys]
        wanted = defined(query[begin : begin + queries], *rows.split(DIM, dim=-1), layer._attention)
        torch.testing.assert_close(output[begin : begin + queries].double(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": [0.5] * HEADS},
        {"attn_type": theirs.AttentionType.ENCODER_ONLY},
        {"attn_type": theirs.AttentionType.ENCODER_DECODER},
    ],
    ids=str,
)
def test_other_layers_are_the_parents(options: dict[str, Any], parents_calls: list[Any]) -> None:
    attend(layer_of(**options), step_of(QUERIES, KEYS, table_of(16, KEYS), 2))
    assert len(parents_calls) == 1


@pytest.mark.parametrize(
    "others",
    [
        {"causal": False},
        {"causal": torch.ones(4, dtype=torch.int32)},
        {"rswa_prefix_lens": torch.ones(4, dtype=torch.int32)},
        {"mm_prefix_query_range_tensor": torch.zeros(45, 2, dtype=torch.int32)},
    ],
    ids=str,
)
def test_other_steps_are_the_parents(others: dict[str, Any], parents_calls: list[Any]) -> None:
    attend(layer_of(), step_of(QUERIES, KEYS, table_of(16, KEYS), 2, **others))
    assert len(parents_calls) == 1


def test_other_caches_are_the_parents(parents_calls: list[Any]) -> None:
    attend(layer_of(), step_of(QUERIES, KEYS, table_of(16, KEYS), 2), cached=torch.uint8)
    assert len(parents_calls) == 1


def test_what_no_kernel_serves_is_the_parents(parents_calls: list[Any]) -> None:
    step = step_of(QUERIES, KEYS, table_of(16, KEYS), 2)
    attend(layer_of(), step, queries=torch.float64, cached=torch.float64)
    attend(layer_of(), None)  # a run that only measures memory
    assert len(parents_calls) == 2


def attend(layer: Any, step: Any, queries: torch.dtype = torch.float16, cached: torch.dtype = torch.float16) -> None:
    query = torch.zeros(sum(QUERIES), HEADS, DIM, dtype=queries)
    cache = torch.zeros(PAGES, HEADS_KV, 16, 2 * DIM, dtype=cached)
    with torch.inference_mode():
        layer.forward(SimpleNamespace(), query, query, query, cache, step, torch.empty_like(query))
