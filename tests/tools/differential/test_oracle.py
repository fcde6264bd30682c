"""The truth is attention: PyTorch's own in float64, and with features the reference of the kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import blocktune
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import Causal
from tools.differential.calls.calls import calls_of
from tools.differential.cases.caches import Cache
from tools.differential.cases.case import Case, CompileClass
from tools.differential.cases.enums import Entry
from tools.differential.cases.tensors import Inputs, inputs_of
from tools.differential.truth.oracle import Problem, attention, truth_of

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"seed": 3, "batch": 2, "seqlen_q": 9, "seqlen_k": 13}


def made(case: Case) -> tuple[Inputs, Problem]:
    inputs = inputs_of(case, CPU)
    tensors = (inputs.query.tensor, inputs.key.tensor, inputs.value.tensor)
    return inputs, calls_of(case, inputs, blocktune).problem(*tensors)


def kind_of(entry: Entry, **options: Any) -> CompileClass:
    return CompileClass(entry=entry, dtype="float32", head_dim=5, head_dim_v=7, heads_kv=2, group=2, **options)


@pytest.mark.parametrize("special", [{}, {"causal": True}, {"mask": "boolean"}, {"mask": "additive"}])
@pytest.mark.parametrize("hidden", ["some", "rows", "all"])
def test_it_is_pytorchs_attention_in_float64(special: dict[str, Any], hidden: str) -> None:
    case = Case(kind=kind_of(Entry.SDPA, **special), hidden=hidden, scale=0.3, **SIZES)
    inputs, problem = made(case)
    truth = truth_of(problem, inputs.grad)
    leaves = [view.tensor.double().requires_grad_() for view in (inputs.query, inputs.key, inputs.value)]
    query, key, value = leaves
    mask = inputs.mask
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    options: dict[str, Any] = {"is_causal": case.kind.causal, "scale": 0.3, "enable_gqa": True}
    out = scaled_dot_product_attention(query, key, value, mask, **options)
    expected = [out, *torch.autograd.grad(out, leaves, inputs.grad.double())]
    torch.testing.assert_close(list(truth.tensors), expected, atol=1e-12, rtol=1e-12)


def test_magnitudes_bound_what_they_belong_to() -> None:
    inputs, problem = made(Case(kind=kind_of(Entry.SDPA, causal=True), **SIZES))
    truth = truth_of(problem, inputs.grad)
    for tensor, magnitude in zip(truth.tensors, truth.magnitudes, strict=True):
        assert bool((tensor.abs() <= magnitude + 1e-12).all())
    problem.key[:, :, 1] = float("-inf")
    hidden = truth_of(replace(problem, query=problem.query.abs()), None)
    assert bool((hidden.tensors[0].abs() <= hidden.magnitudes[0] + 1e-12).all())
    problem.key[:, :, 1] = 0.0
    scores = (problem.query @ problem.key.repeat_interleave(2, 1).mT * problem.scale).abs().amax(-1, keepdim=True)
    assert bool((scores <= truth.score_size + 1e-6).all())


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({"causal": True}, Features()),
        ({"window": True, "causal": True}, Features(window=(4, 2))),
        ({"window": True}, Features(window=(4, 2))),
        ({"softcap": True}, Features(softcap=True)),
        ({"alibi": True}, Features(alibi=True)),
        ({"alibi": True, "slopes_by_batch": True, "causal": True}, Features(alibi=True)),
    ],
)
def test_features_are_those_of_the_kernels_reference(options: dict[str, Any], features: Features) -> None:
    kind = kind_of(Entry.FLASH, **options)
    window = (4, 2) if kind.window else (-1, -1)
    inputs, problem = made(Case(kind=kind, window=window, softcap=1.5 if kind.softcap else 0.0, **SIZES))
    assert_reference(inputs, problem, kind, features)


def test_packed_sequences_are_those_of_the_kernels_reference() -> None:
    kind = kind_of(Entry.VARLEN, causal=True, alibi=True, slopes_by_batch=True)
    case = Case(kind=kind, sequences=((3, 5), (0, 2), (6, 4)), **SIZES | {"batch": 1})
    inputs, problem = made(case)
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in zip(*case.sequences, strict=True)]
    extras = Extras(alibi_slopes=inputs.slopes, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1])
    assert_reference(inputs, problem, kind, Features(alibi=True, varlen=True), extras)


def assert_reference(
    inputs: Inputs, problem: Problem, kind: CompileClass, features: Features, extras: Extras | None = None
) -> None:
    slopes: Tensor | None = inputs.slopes
    if slopes is not None and slopes.dim() == 1:
        slopes = slopes[None]
    extras = extras or Extras(alibi_slopes=slopes, softcap=problem.softcap)
    expected, _ = attention_reference(
        *(view.tensor for view in (inputs.query, inputs.key, inputs.value)),
        causal=Causal.LOWER_RIGHT if kind.causal else Causal.NONE,
        dtype=torch.float64,
        features=features,
        extras=extras,
    )
    torch.testing.assert_close(truth_of(problem, None).tensors[0], expected, atol=1e-10, rtol=1e-10)


def test_what_a_query_does_not_see_has_no_part_in_it() -> None:
    case = Case(kind=kind_of(Entry.SDPA, causal=True), **SIZES)
    inputs, problem = made(case)
    right = truth_of(problem, None).tensors[0]
    for tensor in (inputs.key.tensor, inputs.value.tensor):
        tensor[:, :, 9:] = float("nan")
    torch.testing.assert_close(truth_of(problem, None).tensors[0], right)
    inputs.value.tensor[0, 0, 5, 3] = float("nan")
    poisoned = truth_of(problem, None).tensors[0]
    assert bool(poisoned[0, :2, 5:, 3].isnan().all())
    assert int(poisoned.isnan().sum()) == 2 * 4


def test_an_infinite_key_has_no_part_in_the_rows_that_it_is_infinitely_far_from() -> None:
    query, key, value = (torch.ones(1, 1, 2, 4) for _ in range(3))
    query[:, :, 1] = -1.0
    key[:, :, 0, 0], value[:, :, 0, 2] = float("-inf"), float("inf")
    seen = torch.tensor([[True, False], [True, True]])
    out = attention(Problem(query, key, value, 1.0, seen))
    assert not bool(out[:, :, 0].any())
    assert bool(out[:, :, 1].isnan().all())


def test_a_cache_is_what_was_in_it_and_what_is_appended() -> None:
    kind = replace(kind_of(Entry.KVCACHE, page_size=4, causal=True), dtype="float32")
    case = Case(kind=kind, cached=(3, 10), appended=2, **SIZES | {"seqlen_q": 2, "seqlen_k": 12})
    inputs, problem = made(case)
    truth = truth_of(problem, None).tensors[0]
    query, key, value = (view.tensor.double() for view in (inputs.query, inputs.key, inputs.value))
    for entry, full in enumerate((5, 12)):
        seen = torch.arange(full) <= torch.arange(2)[:, None] + full - 2
        own = scaled_dot_product_attention(
            query[entry], key[entry, :, :full], value[entry, :, :full], seen, enable_gqa=True
        )
        torch.testing.assert_close(truth[entry], own, atol=1e-12, rtol=1e-12)


def test_a_sink_is_a_key_without_a_value() -> None:
    kind = kind_of(Entry.FLASH, causal=True, sinks=True)
    inputs, problem = made(Case(kind=kind, **SIZES))
    assert inputs.sinks is not None
    truth = truth_of(problem, None).tensors[0]
    query, key, value = (view.tensor.double() for view in (inputs.query, inputs.key, inputs.value))
    key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    scores = (query @ key.mT * 5**-0.5).masked_fill(torch.ones(9, 13).triu(5).bool(), float("-inf"))
    sinks = inputs.sinks.double()[:, None, None].expand(2, -1, 9, 1)
    own = torch.cat((sinks, scores), -1).softmax(-1)[..., 1:] @ value
    torch.testing.assert_close(truth, own, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("places", [{}, {"picked": True}, {"padded": True}, {"page_size": 4}])
def test_scores_of_turned_rows_depend_on_distances(places: dict[str, Any], interleaved: bool) -> None:
    """What is turned by angles that grow with the position; equal rows then have equal scores at equal distances."""
    kind = CompileClass(entry=Entry.KVCACHE, dtype="float32", head_dim=8, head_dim_v=8, causal=True, **places)
    case = Case(kind=kind, cached=(3, 6), appended=4, rotary=6, interleaved=interleaved, **SIZES | {"seqlen_q": 4})
    case = replace(case, seqlen_k=12)
    cache = replace(Cache.of(case, CPU), angles=torch.arange(40)[:, None] * torch.tensor([0.1, 0.3, 0.7]).double())
    query, key = cache.turned(torch.ones(2, 1, 4, 8), torch.ones(2, 1, 12, 8))
    for entry, first in enumerate(case.cached):
        new = key[entry, 0, first : first + 4]
        scores = query[entry, 0].double() @ new.double().T
        for distance in range(-3, 4):
            diagonal = scores.diagonal(distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(scores[0, 1:], scores[0, :-1], atol=1e-2)
        assert bool((key[entry, 0, :first] == 1.0).all())
        assert bool((key[entry, 0, first + 4 :] == 1.0).all())
