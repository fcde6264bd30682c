"""Tiny random causal language models of every family of transformers, and how they agree with eager attention.

transformers is imported by the first model: its import takes a second, and most runs of tests build none.
"""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

need_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the Hugging Face integration needs transformers"
)

VOCABULARY = 96
MAX_PARAMETERS = 15_000_000
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # scores of about 1, so that it matters what is attended to
    "sliding_window": 6,
    "pad_token_id": 0,
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
}
"""What a config is given of these, where it has such a size."""

LATENT_SIZES = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""Sizes of models whose keys and values come from a latent vector."""

OWN_SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["moe"] * 3,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "hc_mult": 2,
    },
}
"""Sizes that a family needs besides."""


class UnbuiltError(Exception):
    """No tiny model of a family can be built of `SIZES` alone."""


def families() -> list[str]:
    """Return the model types of transformers' causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(family: str, **sizes: Any) -> Any:
    """Return a random model of a family, in the mode of evaluation, always the same one; sizes: what others it has.

    Raises:
        UnbuiltError: it cannot be built, or is not tiny.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = _tiny_config(family, sizes)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            parameters = sum(each.numel() for each in model_class(config).parameters())
    except Exception as error:  # configs check what they are given in many ways
        raise UnbuiltError(f"{type(error).__name__}: {error}") from error
    if parameters > MAX_PARAMETERS:
        raise UnbuiltError(f"{parameters} parameters")
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)  # sinks that matter
    return model


def _tiny_config(family: str, own_sizes: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    usual = config_class()
    sizes = {name: size for name, size in SIZES.items() if getattr(usual, name, None) is not None}
    types = getattr(usual, "layer_types", None)
    if getattr(usual, "kv_lora_rank", None) and "num_key_value_heads" in sizes:
        sizes |= LATENT_SIZES
    if types and not isinstance(getattr(config_class, "layer_types", None), property):
        sizes["layer_types"] = sorted(set(types))
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    return config_class(**sizes | OWN_SIZES.get(family, {}) | own_sizes)


def padded_tokens() -> tuple[Tensor, Tensor]:
    """Return tokens [2, 16] and which of them are kept: the first entry is padded on the left."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.ones(2, 16, dtype=torch.long)
    kept[0, :5] = 0
    return torch.randint(1, VOCABULARY, (2, 16), generator=generator), kept


def results(model: Any, attention: str) -> list[Tensor]:
    """Return the logits of what is kept, and the gradients of all parameters."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    tokens, kept = padded_tokens()
    logits = model(tokens, attention_mask=kept, use_cache=False).logits[kept.bool()]
    logits.square().mean().backward()
    return [logits.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def generated(model: Any, attention: str) -> Tensor:
    """Return the tokens that a model adds, the most likely ones."""
    model.set_attn_implementation(attention)
    tokens, kept = padded_tokens()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    made: Tensor = model.generate(tokens, attention_mask=kept, **options)
    return made
