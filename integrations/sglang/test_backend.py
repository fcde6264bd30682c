"""The back-end under the installed SGLang: its interface, what it serves, and what it leaves to its parent.

The numbers are those of the portable kernels in Triton's interpreter: TRITON_INTERPRET=1.
"""

import inspect
import tomllib
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

theirs = pytest.importorskip("sglang.srt.layers.attention.flashattention_backend", reason="SGLang is not installed")
ours = import_module("blocktune_sglang.backend")
radix = import_module("sglang.srt.layers.radix_attention")
ForwardMode = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
PAGE = 16
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels run in Triton's interpreter")


class Pool:
    """The keys and values of one layer, a row for each token."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.rows = [torch.randn(PAGES * PAGE, HEADS_KV, DIM, dtype=dtype) for _ in range(2)]

    def get_kv_buffer(self, layer_id: int) -> list[Tensor]:
        return self.rows

    def set_kv_buffer(self, layer: Any, places: Any, k: Tensor, v: Tensor, *scales: None) -> None:
        for rows, new in zip(self.rows, (k, v), strict=True):
            rows[places.loc] = new


def backend_of(**others: Any) -> Any:
    """A back-end of a plain decoder; the real constructor needs a runner and FlashAttention's kernels."""
    made = object.__new__(ours.BlocktuneBackend)
    state: dict[str, Any] = {"page_size": PAGE, "token_to_kv_pool": Pool(), "kv_cache_dtype": torch.float16}
    state |= dict.fromkeys(("use_mla", "fa_skip_kv_cache", "is_prefill_aware_swa", "use_sliding_window_kv_pool"), False)
    state |= {"local_attn_builder": None, "full_cg_prefill_metadata": None, "num_splits": 0}
    state |= {"kv_index_translator": SimpleNamespace(is_translating=False)}
    vars(made).update(state | others)
    return made


def layer_of(**options: Any) -> Any:
    return radix.RadixAttention(HEADS, DIM, DIM**-0.5, HEADS_KV, 0, **options)


def step_of(backend: Any, queries: tuple[int, ...], keys: tuple[int, ...], mode: Any, **others: Any) -> Any:
    """A batch whose last tokens are new; its metadata are the back-end's."""
    table = table_of(PAGE, keys)
    backend.forward_metadata = theirs.FlashAttentionMetadata(
        cache_seqlens_int32=torch.tensor(keys, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *queries]).cumsum(0).int(),
        max_seq_len_q=max(queries),
        page_table=table,
        **others,
    )
    places = [
        int(row[place // PAGE]) * PAGE + place % PAGE
        for row, count, length in zip(table, queries, keys, strict=True)
        for place in range(length - count, length)
    ]
    return SimpleNamespace(
        forward_mode=mode, spec_info=None, out_cache_loc=torch.tensor(places), out_cache_loc_is_physical=False
    )


@pytest.fixture
def parents_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def forward(self: Any, *given: Any, **options: Any) -> Tensor:
        calls.append(given)
        return given[0]

    for name in ("forward_extend", "forward_decode"):
        monkeypatch.setattr(theirs.FlashAttentionBackend, name, forward)
    return calls


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: device_named("h200"))


def attend(backend: Any, layer: Any, step: Any, **features: Any) -> tuple[Tensor, Any]:
    count = step.out_cache_loc.shape[0]
    dtype = backend.token_to_kv_pool.rows[0].dtype
    q = torch.randn(count, HEADS * DIM, dtype=dtype)
    k, v = (torch.randn(count, HEADS_KV, DIM, dtype=dtype) for _ in range(2))
    forward = backend.forward_decode if step.forward_mode.is_decode() else backend.forward_extend
    with torch.inference_mode():
        return q, forward(q, k, v, layer, step, **features)


@pytest.mark.parametrize("name", ["forward_extend", "forward_decode"])
def test_methods_take_what_those_of_the_parent_take(name: str) -> None:
    own, parent = (
        list(inspect.signature(getattr(kind, name)).parameters.values())
        for kind in (ours.BlocktuneBackend, theirs.FlashAttentionBackend)
    )
    assert own[-1].kind is inspect.Parameter.VAR_KEYWORD  # the others have names
    assert [(each.name, each.default) for each in own[:-1]] == [(each.name, each.default) for each in parent[:7]]
    assert {"sinks", "return_lse", "score_mod"} <= {each.name for each in parent[7:]}


def test_the_plugin_stands_where_flash_attention_does(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = import_module("sglang.srt.layers.attention.attention_registry")
    monkeypatch.setattr(registry, "ATTENTION_BACKENDS", dict(registry.ATTENTION_BACKENDS))
    monkeypatch.setattr(registry, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(theirs.FlashAttentionBackend, "__init__", lambda self, runner: None)
    entries = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["project"]["entry-points"]
    module, name = entries[import_module("sglang.srt.plugins").GENERAL_PLUGINS_GROUP]["blocktune"].split(":")
    for _ in range(2):  # processes may load plugins again
        getattr(import_module(module), name)()
        create = registry.ATTENTION_BACKENDS["fa3"]
        assert type(create(SimpleNamespace(use_mla_backend=False))) is ours.BlocktuneBackend
        assert type(create(SimpleNamespace(use_mla_backend=True))) is theirs.FlashAttentionBackend


@interpreted
@pytest.mark.usefixtures("kernels_on_the_cpu")
@pytest.mark.parametrize(
    ("mode", "queries"),
    [(ForwardMode.DECODE, (1, 1, 1, 1)), (ForwardMode.EXTEND, QUERIES), (ForwardMode.MIXED, (3, 40, 1, 1))],
)
@pytest.mark.parametrize(
    ("options", "features"),
    [({}, {}), ({"sliding_window_size": 6, "logit_cap": 2.0}, {}), ({}, {"sinks": SINKS})],
    ids=["plain", "window, soft cap", "sinks"],
)
def test_a_batch_is_attention_of_each_sequence(
    options: dict[str, Any], features: dict[str, Any], mode: Any, queries: tuple[int, ...], parents_calls: list[Any]
) -> None:
    torch.manual_seed(0)
    backend, layer, keys = backend_of(), layer_of(**options), tuple(map(max, KEYS, queries))
    step = step_of(backend, queries, keys, mode)
    q, out = attend(backend, layer, step, **features)
    assert parents_calls == []
    k, v = (rows.unflatten(0, (PAGES, PAGE)) for rows in backend.token_to_kv_pool.rows)
    window = (options.get("sliding_window_size", -1), 0)
    right = ours.BatchAttention(layer.scaling, window=window, softcap=layer.logit_cap, sinks=features.get("sinks"))
    parts = (each.unflatten(-1, (HEADS, DIM)).split(queries) for each in (q, out))
    for query, found, length, pages in zip(*parts, keys, backend.forward_metadata.page_table, strict=True):
        own = (rows[pages.clamp(min=0).long()].flatten(0, 1)[:length] for rows in (k, v))
        torch.testing.assert_close(found.double(), defined(query, *own, right), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "state",
    [
        {"use_mla": True},
        {"fa_skip_kv_cache": True},
        {"is_prefill_aware_swa": True},
        {"page_size": 1},
        {"kv_cache_dtype": torch.float8_e4m3fn},
        {"local_attn_builder": object()},
        {"kv_index_translator": SimpleNamespace(is_translating=True)},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_other_back_ends_are_the_parents(mode: Any, state: dict[str, Any], parents_calls: list[Any]) -> None:
    backend = backend_of(**state)
    attend(backend, layer_of(), step_of(backend, (1, 1), (5, 5), mode))
    assert len(parents_calls) == 1


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({"is_cross_attention": True}, {}),
        ({"attn_type": radix.AttentionType.ENCODER_ONLY}, {}),
        ({}, {"return_lse": True}),
        ({}, {"rel_bias": torch.zeros(1)}),
    ],
    ids=str,
)
def test_other_layers_are_the_parents(
    options: dict[str, Any], features: dict[str, Any], parents_calls: list[Any]
) -> None:
    backend = backend_of()
    attend(backend, layer_of(**options), step_of(backend, (2, 1), (5, 5), ForwardMode.EXTEND), **features)
    assert len(parents_calls) == 1


def test_speculative_steps_are_the_parents(parents_calls: list[Any]) -> None:
    backend = backend_of()
    attend(backend, layer_of(), step_of(backend, (2, 1), (5, 5), ForwardMode.TARGET_VERIFY))
    step = step_of(backend, (1, 1), (5, 5), ForwardMode.DECODE)
    step.spec_info = object()
    attend(backend, layer_of(), step)
    assert len(parents_calls) == 2


def test_what_no_kernel_serves_is_the_parents(parents_calls: list[Any]) -> None:
    """The new keys are written once."""
    backend = backend_of(kv_cache_dtype=torch.float64, token_to_kv_pool=Pool(torch.float64))
    attend(backend, layer_of(), step_of(backend, (2, 1), (5, 5), ForwardMode.EXTEND))
    assert [given[5] for given in parents_calls] == [False]
