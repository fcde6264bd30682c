"""Texts that tiny models generate, compared token by token: where two tokens are tied, either is right."""

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 96
TIE = {"cpu": 1e-4, "cuda": 5e-2}
"""How far two logits may be apart, of the largest one, to count as equal."""

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Return prompts of these lengths, always the same ones."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def eager_tokens(model: Any, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Return what a model adds to a prompt with its own attention, and the logits [count, vocabulary] of it."""
    model.set_attn_implementation("eager")
    tokens = torch.tensor([prompt], device=model.device)
    made = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        min_new_tokens=count,
        output_logits=True,
        return_dict_in_generate=True,
        **GREEDY,
    )
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits).float().cpu()


def assert_same_or_tied(ours: list[int], theirs: list[int], logits: Tensor) -> None:
    """Check a text against another one with its logits [count, vocabulary]; after tied tokens they may differ."""
    assert len(ours) == len(theirs)
    tie = TIE["cuda" if torch.cuda.is_available() else "cpu"]
    for one, other, at in zip(ours, theirs, logits, strict=True):
        if one != other:
            assert at[one] >= at.max() - tie * at.abs().max()
            return
