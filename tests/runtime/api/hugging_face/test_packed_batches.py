"""Sequences that keywords of a layer pack, as collators of transformers do without padding."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.integrations import register_with_transformers
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.api.hugging_face.attention import transformers_attention
from blocktune.runtime.api.hugging_face.packed_batches import keep_within_sequences
from tests.support.models.families import need_transformers, tiny_model

pytestmark = pytest.mark.triton_free

LENGTHS = (7, 1, 12, 4)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0])


def begins(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """The keywords as `DataCollatorWithFlattening` makes them."""
    bounds, longest = begins(lengths), max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def pairs_of(causal: bool, window: int | None) -> Tensor:
    """Which pairs of packed tokens see each other."""
    place = torch.arange(sum(LENGTHS))
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance = place[:, None] - place
    pairs = sequence[:, None] == sequence
    if causal:
        pairs &= distance >= 0
    if window is not None:
        pairs &= distance.abs() < window
    return pairs


def qkv(device: str = "cpu") -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.float16
    sizes = ((1, heads, sum(LENGTHS), 16) for heads in (4, 2, 2))
    return tuple(torch.randn(size).to(device, dtype).requires_grad_() for size in sizes)


@pytest.mark.parametrize("rows", [1, 6])
def test_one_mask_for_a_batch_is_kept_within_the_sequences_of_each_entry(rows: int) -> None:
    query, key = torch.zeros(2, 4, 6, 16), torch.zeros(2, 2, 6, 16)
    mask = torch.rand(1, 1, rows, 6, generator=torch.Generator().manual_seed(1)) > 0.3
    place = torch.repeat_interleave(torch.arange(4), torch.tensor((4, 2, 3, 3))).view(2, 6)
    same = (place[:, :, None] == place[:, None])[:, None]
    keywords = {"cu_seq_lens_q": begins((4, 2, 3, 3))}
    assert torch.equal(keep_within_sequences(mask, query, key, keywords), mask & same)
    added = torch.where(mask, 0.5, -1e9)
    hidden = keep_within_sequences(added, query, key, keywords)
    assert torch.equal(hidden, torch.where(same, added.expand(2, 1, 6, 6), float("-inf")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 3), (False, 3)])
def test_results_are_those_of_a_mask(causal: bool, window: int | None, sinks: Tensor | None, device: str) -> None:
    """Windows without causal have two sides, as in encoders of transformers."""
    module: Any = SimpleNamespace(is_causal=causal)
    options = {"s_aux": None if sinks is None else sinks.to(device), "softcap": 2.0}
    tensors = qkv(device)
    mask = pairs_of(causal, window).to(device)[None, None]
    keywords = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in packed().items()}
    results = []
    for way in ((mask, {}), (None, keywords | {"sliding_window": window})):
        out, _ = transformers_attention(module, *tensors, way[0], **options, **way[1])  # type: ignore[arg-type]
        gradients = torch.autograd.grad(out.square().sum(), tensors)
        results.append((out, *gradients))
    bound = 1e-5 if device == "cpu" else 1e-2
    for one, other in zip(*results, strict=True):
        assert (other - one).float().norm() <= bound * one.float().norm()


@pytest.mark.parametrize("additive", [True, False])
def test_a_mask_is_kept_within_the_sequences(additive: bool) -> None:
    module: Any = SimpleNamespace(is_causal=True)
    mask = torch.ones(1, 1, sum(LENGTHS), sum(LENGTHS), dtype=torch.bool).tril()
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        found, _ = transformers_attention(module, *qkv(), mask, **packed())  # type: ignore[arg-type]
        wanted, _ = transformers_attention(module, *qkv(), pairs_of(True, None)[None, None])  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)


def test_lengths_that_are_not_given_are_counted() -> None:
    module: Any = SimpleNamespace(is_causal=True)
    short = {"cu_seq_lens_q": begins()}
    with torch.no_grad():
        found, _ = transformers_attention(module, *qkv(), None, **short)  # type: ignore[arg-type]
        torch.testing.assert_close(found, transformers_attention(module, *qkv(), None, **packed())[0])  # type: ignore[arg-type]


def test_bounds_that_end_behind_the_tokens_are_refused() -> None:
    module: Any = SimpleNamespace(is_causal=True)
    with pytest.raises(UsageError, match="cu_seqlens_q"):
        transformers_attention(module, *qkv(), None, **packed((7, 1, 12, 40)))  # type: ignore[arg-type]


@need_transformers
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_model_takes_a_flattened_batch(family: str) -> None:
    """Given positions that begin again, Llama makes a mask of them; GPT-OSS makes one that does not know them."""
    model = tiny_model(family)
    tokens = torch.randint(1, 96, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        alone = [model(each, use_cache=False).logits for each in tokens.split(LENGTHS, dim=1)]
        model.set_attn_implementation(register_with_transformers())
        together = model(tokens, position_ids=positions, use_cache=False, **packed()).logits
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)
