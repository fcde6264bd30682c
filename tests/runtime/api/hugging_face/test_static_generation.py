"""`generate(cache_implementation="static")` of transformers compiles the model's step by itself, with CUDA graphs.

On a GPU with its default settings; the CPU, for which transformers compiles nothing by itself, traces the same graphs.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.integrations import register_with_transformers
from tests.support.models.families import need_transformers, padded_tokens, tiny_model
from tests.support.models.generation import assert_same_or_tied

pytestmark = [pytest.mark.triton_free, need_transformers]

FAMILIES = ("llama", "mistral", "gemma2", "qwen3", "gpt_oss", "phi3")
CASES = [
    *((family, "cpu") for family in ("llama", "gpt_oss")),
    *(pytest.param(family, "cuda", marks=pytest.mark.gpu) for family in FAMILIES),
]
SIZES = {"hidden_size": 256, "head_dim": 64, "num_experts_per_tok": 2}
"""All experts that a model has: a choice that hangs on the rounding of its router changes the whole text."""

NEW_TOKENS = 20


def compile_settings(device: str) -> Any:
    """The default ones on a GPU."""
    if device == "cuda":
        return None
    from transformers import CompileConfig

    settings = CompileConfig(backend="eager", mode=None)
    settings._compile_all_devices = True
    return settings


def generated(family: str, attention: str, device: str) -> tuple[Tensor, Tensor]:
    """The new tokens [batch, steps], and the logits [batch, steps, vocabulary] of which they are the largest."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(family, **SIZES).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    model.set_attn_implementation(attention)
    tokens, kept = (each.to(device) for each in padded_tokens())
    made = model.generate(
        tokens,
        attention_mask=kept,
        cache_implementation="static",
        compile_config=compile_settings(device),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled
    return made.sequences[:, tokens.shape[1] :].cpu(), torch.stack(made.logits, dim=1).float().cpu()


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # a hint of PyTorch's compiler on a GPU
@pytest.mark.parametrize(("family", "device"), CASES)
def test_a_compiled_step_generates_the_same_tokens_or_tied_ones(family: str, device: str) -> None:
    """Compared with sdpa, or with eager where the model refuses that. Behind two tied tokens, texts may differ."""
    theirs = "sdpa" if tiny_model(family)._supports_sdpa else "eager"
    (ours, _), (tokens, logits) = (generated(family, each, device) for each in (register_with_transformers(), theirs))
    for row in range(len(tokens)):
        assert_same_or_tied(ours[row].tolist(), tokens[row].tolist(), logits[row])
