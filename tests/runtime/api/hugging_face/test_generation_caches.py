"""Texts of six families over every kind of cache, with prompts in chunks and with drafts, as eager attention has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.integrations import register_with_transformers
from tests.support.models.families import need_transformers, padded_tokens, tiny_model
from tests.support.models.generation import GREEDY, assert_same_or_tied

pytestmark = [pytest.mark.triton_free, need_transformers]

FAMILIES = ("llama", "mistral", "gemma2", "qwen3", "gpt_oss", "phi3")
NEW_TOKENS = 10
CHUNK = 5
"""Shorter than a window, and no divisor of a prompt's length."""


WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "dynamic, chunks": {"prefill_chunk_size": CHUNK},
    "static": {"cache_implementation": "static"},
    "static, chunks": {"cache_implementation": "static", "prefill_chunk_size": CHUNK},
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {},
    "hqq": {"nbits": 4, "q_group_size": 16, "residual_length": 4, "axis_key": 1, "axis_value": 1},
}
"""Settings of quantized caches: with these, HQQ keeps the last tokens as they are."""


def generated(model: Any, attention: str, tokens: Tensor, kept: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The new tokens [batch, steps] and the logits [batch, steps, vocabulary]."""
    model.set_attn_implementation(attention)
    made = model.generate(
        tokens,
        attention_mask=kept,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        **GREEDY,
        **options,
    )
    return made.sequences[:, tokens.shape[1] :], torch.stack(made.logits, dim=1)


def assert_as_eager(model: Any, tokens: Tensor, kept: Tensor, **options: Any) -> None:
    ours, _ = generated(model, register_with_transformers(), tokens, kept, **options)
    theirs, logits = generated(model, "eager", tokens, kept, **options)
    for row in range(len(tokens)):
        assert_same_or_tied(ours[row].tolist(), theirs[row].tolist(), logits[row])


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_over_a_cache(family: str, way: str) -> None:
    """One of the two prompts is padded; windows are shorter than both."""
    assert_as_eager(tiny_model(family), *padded_tokens(), **WAYS[way])


@pytest.mark.parametrize("backend", QUANTIZED)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_texts_over_a_quantized_cache(family: str, backend: str) -> None:
    """transformers quantizes no caches of layers with a window."""
    if backend == "hqq":
        pytest.importorskip("hqq")
    config = {"backend": backend, **QUANTIZED[backend]}
    assert_as_eager(tiny_model(family), *padded_tokens(), cache_implementation="quantized", cache_config=config)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_own_draft", [True, False])
def test_drafts_of_another_model_are_checked(family: str, is_own_draft: bool) -> None:
    """Drafts of a model's own are all taken, those of another one nearly all refused."""
    model = tiny_model(family)
    draft = tiny_model(family if is_own_draft else "llama")
    draft.set_attn_implementation(register_with_transformers())
    tokens, kept = padded_tokens()
    asked: list[int] = []
    model.register_forward_pre_hook(
        lambda *arguments: asked.append(arguments[-1]["input_ids"].shape[1]), with_kwargs=True
    )
    assert_as_eager(model, tokens[1:], kept[1:], assistant_model=draft)
    assert max(asked[1:]) > 1  # several queries over a filled cache


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_from_the_prompt_are_checked(family: str) -> None:
    tokens = torch.tensor([[5, 9, 31, 5, 9, 31, 5, 9, 31, 5, 9]])
    assert_as_eager(tiny_model(family), tokens, torch.ones_like(tokens), prompt_lookup_num_tokens=3)
