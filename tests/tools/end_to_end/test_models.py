"""Whole models with our attention and with PyTorch's: the same results, and rows that say what was timed."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tools.end_to_end.caches import OurCache, SdpaCache
from tools.end_to_end.gpt import GptSizes
from tools.end_to_end.llama import Decoder, LlamaSizes
from tools.end_to_end.rows import OURS, SDPA, DecodeLoop, DisagreementError, Lab, Row, _compare_results, rows
from tools.end_to_end.turns import Run, Spread, in_turns

CPU = torch.device("cpu")
LAB = Lab(CPU, torch.float32, rounds=4, steps=2)
GPT = GptSizes(layers=2, num_heads=2, head_dim=16, vocabulary=31, batch=2, seqlen=20)
LLAMA = LlamaSizes(layers=2, num_heads=4, num_heads_kv=2, head_dim=16, inner=48, vocabulary=29, capacity=24, filled=9)


def test_rows_hold_times_of_both_and_their_ratio() -> None:
    training, decoding = (json.loads(json.dumps(row.to_json())) for row in rows(LAB, GPT, LLAMA))
    assert (training["model"], decoding["mode"]) == ("GPT-2, training", "eager")
    for row in (training, decoding):
        assert set(row["step_us"]) == {OURS, SDPA}
        assert set(row["ratios"]) == {SDPA}
        assert 0 < row["step_us"][OURS]["low"] <= row["step_us"][OURS]["median"] <= row["step_us"][OURS]["high"]
        assert row["refused"] == {}


@pytest.mark.parametrize("sliced", [False, True])
def test_a_decoder_gives_the_logits_of_the_whole_sequence(sliced: bool) -> None:
    """Decoding from an empty cache is attention over all tokens so far, whoever keeps the cache."""
    model = Decoder(LLAMA, CPU, torch.float32)
    ours = DecodeLoop(model, OurCache(LLAMA, CPU, torch.float32), 1, nullcontext)
    theirs = DecodeLoop(model, SdpaCache(LLAMA, CPU, torch.float32, sliced=sliced), 1, nullcontext)
    for one, other in zip(ours.first_logits(), theirs.first_logits(), strict=True):
        torch.testing.assert_close(one, other)
    again = ours.first_logits()
    torch.testing.assert_close(again, theirs.first_logits())
    assert not torch.allclose(again[0], again[1])


def test_results_that_differ_are_not_timed() -> None:
    results = {SDPA: [torch.ones(4)], OURS: [torch.ones(4) + 1e-3]}
    with pytest.raises(DisagreementError, match=r"blocktune differs from sdpa by 1\.00e-03"):
        _compare_results(results, results.__getitem__, LAB)


def test_a_peer_that_refuses_is_named_and_ours_may_not() -> None:
    def results(name: str) -> list[Tensor]:
        if name == refusing:
            raise RuntimeError("No available kernel.\nMore of it")
        return [torch.ones(2)]

    refusing = "cudnn"
    names = dict.fromkeys((OURS, SDPA, "cudnn"))
    assert _compare_results(names, results, LAB) == {"cudnn": "RuntimeError: No available kernel."}
    refusing = OURS
    with pytest.raises(RuntimeError, match="No available kernel"):
        _compare_results(names, results, LAB)


def test_programs_take_turns_and_the_first_round_counts_for_nothing() -> None:
    order: list[str] = []

    def run(name: str) -> Run:
        return Run(lambda: order.append(name.upper()), lambda: order.append(name))

    timed = in_turns({"a": run("a"), "b": run("b")}, CPU, rounds=3, steps=2)
    assert "".join(order) == "AaaBbb" + "BbbAaa" + "AaaBbb" + "BbbAaa"
    assert set(timed.ratios) == {"b"}


def test_spreads_are_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    row = Row("m", "eager", {}, in_turns({"a": Run(lambda: None, lambda: None)}, CPU, 2, 1))
    assert row.to_json()["ratios"] == {}
