"""`generate_batch` of transformers with our name: prompts in chunks, shared prefixes, pages, windows and sinks."""

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.integrations import register_with_transformers
from blocktune.runtime.api.hugging_face import packed_batches
from blocktune.runtime.api.hugging_face.continuous_batching import FIRST
from tests.support.models.families import need_transformers, tiny_model
from tests.support.models.generation import GREEDY, assert_same_or_tied, eager_tokens, prompts

pytestmark = [
    pytest.mark.triton_free,
    need_transformers,
    pytest.mark.skipif(
        find_spec("transformers") is not None and tuple(map(int, version("transformers").split(".")[:2])) < FIRST,
        reason="generate_batch takes our name from transformers 5.23 on",
    ),
]

FAMILIES = ("llama", "mistral", "gemma2", "qwen3", "gpt_oss", "phi3")
LENGTHS = (3, 21, 9, 40)
NEW_TOKENS = 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_GPU = {"head_dim": 64, "hidden_size": 256, "num_experts_per_tok": 2}
"""All experts that a model has: a choice that hangs on the rounding of its router changes the whole text."""


def model_on(device: str, family: str) -> Any:
    model = tiny_model(family, **(ON_GPU if device == "cuda" else {}))
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def generated(model: Any, batch: list[list[int]], **settings: Any) -> list[list[int]]:
    """What `generate_batch` adds to each prompt with our attention; a batch takes fewer tokens than a prompt has."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model.set_attn_implementation(register_with_transformers())
    found = model.generate_batch(
        batch,
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, **GREEDY),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"page_size": 16, "num_blocks": 64, "max_batch_tokens": 32} | settings
        ),
        progress_bar=False,
    )
    assert model.config._attn_implementation == "blocktune"
    assert [each.error for each in found.values()] == [None] * len(batch)
    return [each.generated_tokens for each in sorted(found.values(), key=lambda each: int(each.request_id[4:]))]


def assert_as_eager(model: Any, batch: list[list[int]], ours: list[list[int]]) -> None:
    for prompt, tokens in zip(batch, ours, strict=True):
        assert_same_or_tied(tokens, *eager_tokens(model, prompt, NEW_TOKENS))


@pytest.fixture
def calls_of_pages(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tables of the calls over pages; transformers looks for a GPU before it makes any, and here for none."""
    from transformers.generation.continuous_batching import initialization

    tables: list[Tensor] = []

    @torch.compiler.disable
    def record(table: Tensor) -> None:
        tables.append(table.clone())  # the next step's is in the same place

    def attend_pages(*tensors: Tensor, **options: Any) -> Tensor:
        record(tensors[6])
        return original(*tensors, **options)

    original = packed_batches.attend_pages
    monkeypatch.setattr(packed_batches, "attend_pages", attend_pages)
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *arguments: None)
    return tables


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_eager_attention_one_by_one(family: str, device: str) -> None:
    """Not those of `paged|eager`, which leaves out the soft cap of Gemma 2."""
    model, batch = model_on(device, family), prompts(LENGTHS)
    assert_as_eager(model, batch, generated(model, batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "compiled"), [("llama", False), ("qwen3", False), ("llama", True)])
def test_single_tokens_are_written_and_read_in_pages(family: str, compiled: bool, calls_of_pages: list[Tensor]) -> None:
    """A compiled step, like a captured one, has more sequences than there are requests: their table is -1."""
    from transformers import CompileConfig

    torch.compiler.reset()
    step = CompileConfig(backend="eager", fullgraph=False, mode=None) if compiled else None
    model, batch = model_on("cpu", family), prompts((*LENGTHS, 5))
    settings = {"max_blocks_per_request": 8, "max_requests_per_batch": 8, "decode_compile_config": step}
    ours = generated(model, batch, **settings)
    assert calls_of_pages
    assert any(bool((table == -1).all(dim=1).any()) for table in calls_of_pages) == compiled
    assert_as_eager(model, batch, ours)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_captured_steps_over_pages(family: str) -> None:
    model, batch = model_on("cuda", family), prompts(LENGTHS)
    assert_as_eager(model, batch, generated(model, batch, use_cuda_graph=True, page_size=256))


@pytest.mark.exhaustive
def test_prompts_with_one_beginning_share_its_pages() -> None:
    model, (beginning,) = model_on("cpu", "llama"), prompts((34,))
    batch = [beginning + rest for rest in prompts((5, 9, 2))]
    assert_as_eager(model, batch, generated(model, batch, allow_block_sharing=True))


def test_other_names_are_asked_of_transformers() -> None:
    from transformers.generation.continuous_batching import continuous_api

    for name in ("another name", "blocktune"):
        register_with_transformers(name)
    asked = continuous_api.is_flash_attention_requested
    names = ("another name", "blocktune", "flash_attention_2", "sdpa", None)
    assert [asked(requested_attention_implementation=name) for name in names] == [True, True, True, False, False]
    assert asked(requested_attention_implementation="flash_attention_2", version=3) is False


def test_older_versions_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.setattr("transformers.__version__", "5.22.2")
    register_with_transformers("older")
    assert not continuous_api.is_flash_attention_requested(requested_attention_implementation="older")


def test_a_registration_replaces_nothing_twice() -> None:
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    register_with_transformers()
    before = [module.is_flash_attention_requested for module in (cache, continuous_api, initialization)]
    register_with_transformers("another name")
    assert before == [module.is_flash_attention_requested for module in (cache, continuous_api, initialization)]
