"""Causal language models of transformers compute with our attention what they compute eagerly.

Six families of different kinds are always tested. BLOCKTUNE_FAMILIES=all tests every family of the installed
transformers (`make test-transformers`) and compares with tests/data/transformers_families.json which ones are refused
and which ones cannot be built tiny; BLOCKTUNE_FAMILIES=record writes that file.
"""

import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.integrations import register_with_transformers
from tests.support.models.families import (
    UnbuiltError,
    families,
    generated,
    need_transformers,
    results,
    tiny_model,
)

pytestmark = [pytest.mark.triton_free, need_transformers]

SOME = ("llama", "mistral", "gemma2", "qwen3", "gpt_oss", "deepseek_v4")
MODE = os.environ.get("BLOCKTUNE_FAMILIES", "some")
RECORD = Path(__file__).parents[3] / "data" / "transformers_families.json"
SAME, REFUSED, UNBUILT, NOT_EAGER = "same", "refused", "not built", "not eager"


def assert_as_eager(model: Any) -> None:
    ours = results(model, register_with_transformers())
    for mine, eager in zip(ours, results(model, "eager"), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-4 * max(1.0, float(eager.abs().max())))


@pytest.mark.parametrize("family", SOME)
def test_logits_and_gradients_with_left_padding(family: str) -> None:
    assert_as_eager(tiny_model(family))


@pytest.mark.parametrize("family", SOME)
def test_generation_with_left_padding(family: str) -> None:
    model = tiny_model(family)
    assert generated(model, register_with_transformers()).equal(generated(model, "eager"))


def outcome_of(family: str) -> str:
    """What a family does with our attention; raises where it computes something else than eagerly."""
    try:
        model = tiny_model(family)
    except UnbuiltError:
        return UNBUILT
    try:
        results(model, "eager")
    except Exception:  # of the many inputs that a model may want besides
        return NOT_EAGER
    try:
        assert_as_eager(model)
    except (NotImplementedError, ValueError):
        return REFUSED
    return SAME


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, str]]:
    found: dict[str, str] = {} if MODE == "record" else json.loads(RECORD.read_text())["families"]
    yield found
    if MODE == "record":
        text = json.dumps({"transformers": version("transformers"), "families": found}, indent=1)
        RECORD.write_text(text + "\n")


@pytest.mark.skipif(MODE == "some", reason="BLOCKTUNE_FAMILIES=all tests every family")
@pytest.mark.parametrize("family", families() if MODE != "some" else [])
def test_every_family(family: str, recorded: dict[str, str]) -> None:
    outcome = outcome_of(family)
    if MODE == "record":
        recorded[family] = outcome
    assert outcome == recorded[family]
