"""`generate_batch` of six families with our attention: the texts next to eager attention's, and tokens a second."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blocktune.integrations import register_with_transformers

FAMILIES = ("llama", "mistral", "gemma2", "qwen3", "gpt_oss", "phi3")
TIE = 0.05
"""How far two logits of 16 bits may be apart, of the largest one, to count as equal."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A random model of a family, and what it is asked for."""

    hidden_size: int = 1024
    layers: int = 4
    head_dim: int = 128
    prompts: int = 12
    longest: int = 700
    new_tokens: int = 24

    def model(self, family: str, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the same random model each time."""
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        heads = self.hidden_size // self.head_dim
        sizes = {
            "vocab_size": 4096,
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": self.head_dim,
            "max_position_embeddings": 4096,
            "initializer_range": 0.05,
            "sliding_window": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,  # a choice of experts would hang on rounding
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        }
        kind = CONFIG_MAPPING[family]
        usual = kind()
        config = kind(**{name: size for name, size in sizes.items() if hasattr(usual, name)})
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).to(device, dtype).eval()

    def texts(self) -> list[list[int]]:
        """Return prompts of many lengths."""
        lengths = torch.linspace(3, self.longest, self.prompts).long().tolist()
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(2, 4096, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """How the texts of a family compare. tied: texts that go another way after two equal logits. Seconds are those of
    whole calls of `generate_batch`, in which graphs are captured."""

    family: str
    same: int
    tied: int
    wrong: int
    tokens_per_second: dict[str, float]


def batch_row(
    family: str, workload: Workload, device: torch.device, dtype: torch.dtype, *, is_timed: bool = False
) -> BatchRow:
    """Return what `generate_batch` makes of a family's prompts; is_timed: how fast, too, next to sdpa."""
    model, prompts = workload.model(family, device, dtype), workload.texts()
    model.set_attn_implementation(register_with_transformers())
    ours, speeds = _generate(model, prompts, workload), {}
    for name in (register_with_transformers(), "sdpa") if is_timed else ():
        model.set_attn_implementation(name)
        _generate(model, prompts, workload)  # compiles kernels
        began = time.perf_counter()
        found = _generate(model, prompts, workload)
        speeds[name] = sum(map(len, found)) / (time.perf_counter() - began)
    verdicts = [_compare(model, prompt, text) for prompt, text in zip(prompts, ours, strict=True)]
    same, tied, wrong = (verdicts.count(verdict) for verdict in ("same", "tied", "wrong"))
    return BatchRow(family, same, tied, wrong, speeds)


def _generate(model: Any, prompts: list[list[int]], workload: Workload) -> list[list[int]]:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    count = workload.new_tokens
    greedy = GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        num_blocks=8 * len(prompts), max_batch_tokens=1024, max_requests_per_batch=16, auto_switch_to_flash=False
    )
    found = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=batching, progress_bar=False
    )
    failed = [each.error for each in found.values() if each.error]
    if failed or len(found) != len(prompts):
        raise RuntimeError(f"generate_batch served {len(found)} of {len(prompts)} prompts: {failed[:1]}")
    return [each.generated_tokens for each in sorted(found.values(), key=lambda each: int(each.request_id[4:]))]


def _compare(model: Any, prompt: list[int], text: list[int]) -> str:
    """Return whether a text is eager attention's: its logits of the whole text say which token was the likeliest."""
    model.set_attn_implementation("eager")
    tokens = torch.tensor([prompt + text], device=model.device)
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
    likeliest = logits.max(dim=1).values
    if bool((chosen == likeliest).all()):
        return "same"
    return "tied" if bool((chosen >= likeliest - TIE * logits.abs().amax(dim=1)).all()) else "wrong"
