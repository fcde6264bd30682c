"""Every function under every circumstance that a CPU has is called as the definition has it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import blocktune
from tools.differential.cases.case import Case, CompileClass
from tools.differential.cases.enums import COMPILED, HOOKED, KV, QKV, Entry, Mode
from tools.differential.runs.runner import Outcome, run_case
from tools.differential.truth.verdict import Verdict

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"seed": 3, "batch": 2, "seqlen_q": 9, "seqlen_k": 9}


def kind_of(entry: Entry, **options: Any) -> CompileClass:
    group = 1 if entry in QKV else 2
    return CompileClass(
        entry=entry, dtype="float32", head_dim=8, head_dim_v=8, heads_kv=2, **{"group": group} | options
    )


def outcome(case: Case, subject: Any = blocktune) -> Outcome:
    return run_case(case, CPU, subject, lambda message: None)


def a_case(entry: Entry, **options: Any) -> Case:
    gradients = entry is not Entry.KVCACHE
    kind = kind_of(entry, gradients=gradients, causal=entry not in (Entry.MERGE, Entry.TORCH_VARLEN), **options)
    if kind.is_packed:
        return Case(kind=kind, sequences=((3, 3), (0, 0), (6, 6)), slack=(100, 7), **SIZES | {"batch": 1})
    return Case(kind=kind, cached=(3, 7) if entry is Entry.KVCACHE else (), **SIZES)


@pytest.mark.parametrize("entry", list(Entry))
def test_functions_are_right(entry: Entry) -> None:
    assert outcome(a_case(entry)).verdict is Verdict.RIGHT


@pytest.mark.parametrize("mode", sorted(set(Mode) - {*COMPILED, Mode.AUTOCAST, Mode.DTENSOR, Mode.REORDERED}))
def test_circumstances_are_right(mode: Mode) -> None:
    case = replace(a_case(Entry.FLASH), mode=mode)
    if mode in (Mode.NO_GRAD, Mode.INFERENCE):
        case = replace(case, kind=replace(case.kind, gradients=False))
    assert outcome(case).verdict is Verdict.RIGHT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # a compiler looks at that of views
@pytest.mark.few(2)
@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_are_right(mode: Mode, dynamic: bool) -> None:
    assert outcome(replace(a_case(Entry.FLASH), mode=mode, dynamic=dynamic)).verdict is Verdict.RIGHT


@pytest.mark.parametrize("entry", [Entry.FLASH, Entry.VARLEN])
@pytest.mark.parametrize("by_batch", [False, True])
def test_gradients_of_slopes_and_sinks_are_compared(entry: Entry, by_batch: bool) -> None:
    case = replace(a_case(entry, alibi=True, sinks=True, slopes_by_batch=by_batch), needs="qkvas")
    found = outcome(case)
    assert found.verdict is Verdict.RIGHT, found
    assert {each.name for each in found.comparisons} == {"out", "q", "k", "v", "a", "s"}


def test_gradients_that_do_not_reach_the_slopes_are_named() -> None:
    def without(*tensors: Tensor, alibi_slopes: Tensor, **options: Any) -> Tensor:
        return blocktune.flash_attn_func(*tensors, alibi_slopes=alibi_slopes.detach(), **options)

    case = replace(a_case(Entry.FLASH, alibi=True), needs="qa", scale=0.1)
    found = outcome(case, SimpleNamespace(flash_attn_func=without))
    assert found.verdict is Verdict.WRONG
    assert {each.name for each in found.comparisons if not each.is_right} == {"a"}


@pytest.mark.parametrize("hides", ["least", "mixed", "infinity"])
@pytest.mark.parametrize("hidden", ["rows", "left", "right", "all"])
def test_rows_of_the_least_number_give_their_keys_one_weight(hides: str, hidden: str) -> None:
    """By PyTorch's mathematics, which are right here."""

    def attention(*arguments: Any, **options: Any) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(*arguments, **options)

    def doubled(*arguments: Any, **options: Any) -> Tensor:
        query, key, value, mask = arguments
        dead = (mask <= torch.finfo(torch.float32).min).all(-1, keepdim=True)
        return attention(*arguments, **options) + attention(query, key, value - value.detach(), mask, **options) * dead

    kind = kind_of(Entry.SDPA, mask="additive", gradients=True)
    case = Case(kind=kind, hidden=hidden, hides=hides, **SIZES)
    assert outcome(case, SimpleNamespace(attention=attention)).verdict is Verdict.RIGHT
    if hides == "least" and hidden in ("rows", "all"):  # gradients of the values twice as large in such rows
        found = outcome(case, SimpleNamespace(attention=doubled))
        assert {each.name for each in found.comparisons if not each.is_right} >= {"v"}


@pytest.mark.parametrize("options", [{"window": True}, {"softcap": True, "sinks": True}, {"mask": "boolean"}])
@pytest.mark.parametrize("queries", [1, 9])
def test_layers_of_transformers_are_right(options: dict[str, Any], queries: int) -> None:
    causal = "mask" not in options
    kind = kind_of(Entry.TRANSFORMERS, causal=causal, gradients=True, **options)
    window = (4, -1) if kind.window else (-1, -1)
    case = Case(kind=kind, window=window, softcap=2.0 if kind.softcap else 0.0, **SIZES | {"seqlen_q": queries})
    assert outcome(case).verdict is Verdict.RIGHT


@pytest.mark.parametrize(
    "changes",
    [
        {"shared": True},
        {"one_length": True, "cached": (5, 5)},
        {"apart": True},
        {"sliced": True},
        {"appended": 2, "shared": True},
    ],
)
def test_caches_are_right(changes: dict[str, Any]) -> None:
    kind = kind_of(Entry.KVCACHE, page_size=4, causal=True, sinks=True)
    case = replace(Case(kind=kind, cached=(9, 6), **SIZES | {"seqlen_k": 12, "seqlen_q": 2}), **changes)
    assert outcome(case).verdict is Verdict.RIGHT


@pytest.mark.parametrize("mode", HOOKED)
def test_hooks_see_what_is_saved(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.differential.calls import tools

    seen: list[Tensor] = []
    hooks: Callable[..., Any] = tools.saved_tensors_hooks

    def watched(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        return hooks(lambda own: seen.append(own) or pack(own), unpack)

    monkeypatch.setattr(tools, "saved_tensors_hooks", watched)
    outcome(replace(a_case(Entry.FLASH), mode=mode))
    assert len(seen) >= 3


@pytest.mark.parametrize("entry", [*KV, *QKV])
def test_tensors_in_one_are_views_of_it(entry: Entry) -> None:
    """Rows of one part are as far apart as all parts are long."""
    strides = []

    def watched(first: Tensor, *others: Any, **options: Any) -> Any:
        packed = first if entry in QKV else others[0]
        strides.append((packed.shape[-3], packed.is_contiguous()))
        return getattr(blocktune, entry)(first, *others, **options)

    assert outcome(a_case(entry), SimpleNamespace(**{entry: watched})).verdict is Verdict.RIGHT
    assert set(strides) == {(3 if entry in QKV else 2, True)}
