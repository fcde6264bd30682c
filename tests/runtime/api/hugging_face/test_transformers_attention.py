"""Tiny random models of transformers with our attention: logits as with sdpa."""

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktune import Dispatcher
from blocktune.integrations import register_with_transformers
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.api.hugging_face.attention import transformers_attention
from tests.support.models.families import need_transformers

pytestmark = [pytest.mark.triton_free, need_transformers]

VOCABULARY = 96
WINDOW = 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # scores of about 1, so that it matters what is attended to
}
SAME_ROUNDING = {"cpu": {"rtol": 1e-5, "atol": 1e-5}, "cuda": {"rtol": 5e-2, "atol": 1e-1}}

Model = Any


def llama(**changes: Any) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes))


def mistral() -> Model:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))


def both_ways(model: Model, compute: Callable[[Model], torch.Tensor], device: str, others: str = "sdpa") -> None:
    """The result of `compute` is the same with another attention and with ours."""
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()
    results = []
    for name in (others, register_with_transformers()):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results.append(compute(model))
    torch.testing.assert_close(results[1], results[0], **SAME_ROUNDING[device])


def tokens(batch: int, length: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_logits_with_grouped_heads(device: str, heads_kv: int) -> None:
    both_ways(llama(num_key_value_heads=heads_kv), lambda model: model(tokens(2, 24, device)).logits, device)


def test_every_layer_calls_the_dispatcher_that_was_registered() -> None:
    calls = []

    class Counting(Dispatcher):
        def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor:
            calls.append(options["enable_gqa"])
            return super().__call__(*arguments, **options)

    model = llama().eval()
    model.set_attn_implementation(register_with_transformers("counting", dispatcher=Counting()))
    model(tokens(1, 8, "cpu"))
    assert calls == [True, True]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [llama, mistral])
def test_logits_with_left_padding(device: str, make: Callable[[], Model]) -> None:
    kept = torch.ones(3, 16, dtype=torch.long, device=device)
    kept[0, :5], kept[1, :11] = 0, 0

    def logits(model: Model) -> torch.Tensor:
        return model(tokens(3, 16, device), attention_mask=kept).logits[kept.bool()]

    both_ways(make(), logits, device)


def test_padding_is_seen() -> None:
    """What is padded cannot change the logits of what is not: the mask function is registered too."""
    model = llama().eval()
    model.set_attn_implementation(register_with_transformers())
    kept = torch.ones(1, 12, dtype=torch.long)
    kept[:, :4] = 0
    first, second = tokens(1, 12, "cpu"), tokens(1, 12, "cpu")
    second[:, :4] = (second[:, :4] + 1) % VOCABULARY
    with torch.no_grad():
        one, other = (model(ids, attention_mask=kept).logits[:, 4:] for ids in (first, second))
    torch.testing.assert_close(one, other)


def cache_argument(model: Model) -> str:
    """What models call their cache: `cache` since transformers 5.24, which warns of the name before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [llama, mistral])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_and_decoding_over_a_cache(device: str, make: Callable[[], Model], cache: str) -> None:
    """The prefill of a static cache has more keys than queries; windows are shorter than what is decoded."""
    from transformers import DynamicCache, StaticCache

    ids = tokens(2, 14, device)

    def logits(model: Model) -> torch.Tensor:
        past: Any = DynamicCache(config=model.config)
        if cache == "static":
            past = StaticCache(config=model.config, max_cache_len=32)
        steps = [ids[:, :9], *ids[:, 9:12].split(1, 1), ids[:, 12:]]  # ends with several queries over a filled cache
        return torch.cat([model(step, **{cache_argument(model): past}).logits for step in steps], dim=1)

    both_ways(make(), logits, device)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_left_padding(cache: str | None) -> None:
    kept = torch.ones(2, 8, dtype=torch.long)
    kept[0, :3] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    def generated(model: Model) -> torch.Tensor:
        ids = tokens(2, 8, "cpu")
        return model.generate(ids, attention_mask=kept, cache_implementation=cache, **options)

    both_ways(mistral(), generated, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_soft_cap_is_computed_where_sdpa_refuses_it(device: str) -> None:
    """Gemma 2: capped scores, windows in every other layer, padding; as its own eager attention has it."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    capped = {"attn_logit_softcapping": 2.0, "sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 4}
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, **capped))
    kept = torch.ones(2, 16, dtype=torch.long, device=device)
    kept[0, :5] = 0

    def logits(model: Model) -> torch.Tensor:
        return model(tokens(2, 16, device), attention_mask=kept).logits[kept.bool()]

    both_ways(model, logits, device, others="eager")


def gpt_oss() -> Model:
    """Sinks that matter, windows in every other layer."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW}
    model = GptOssForCausalLM(GptOssConfig(**sizes))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


@pytest.mark.parametrize("device", DEVICES)
def test_sinks_are_computed_as_eagerly(device: str) -> None:
    kept = torch.ones(2, 16, dtype=torch.long, device=device)
    kept[0, :5] = 0

    def logits(model: Model) -> torch.Tensor:
        return model(tokens(2, 16, device), attention_mask=kept).logits[kept.bool()]

    both_ways(gpt_oss(), logits, device, others="eager")


@pytest.mark.parametrize("cache", [None, "static"])
def test_sinks_generate_the_same_tokens(cache: str | None) -> None:
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}

    def generated(model: Model) -> torch.Tensor:
        return model.generate(tokens(2, 9, "cpu"), cache_implementation=cache, **options)

    both_ways(gpt_oss(), generated, "cpu", others="eager")


@pytest.mark.parametrize("device", DEVICES)
def test_sinks_learn_in_training(device: str) -> None:
    model = gpt_oss().to(device, torch.float32).train()
    ids, gradients = tokens(2, 16, device), []
    for name in ("eager", register_with_transformers()):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        attention = [layer.self_attn for layer in model.model.layers]
        gradients.append([part.grad.clone() for own in attention for part in (own.sinks, own.q_proj.weight)])
    for one, other in zip(*gradients, strict=True):
        assert bool(other.any())
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_packed_sequences_by_their_positions() -> None:
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    both_ways(llama(), lambda model: model(tokens(1, 12, "cpu"), position_ids=positions).logits, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_in_training(device: str) -> None:
    model = llama().to(device, torch.float32 if device == "cpu" else torch.bfloat16).train()
    ids, gradients = tokens(2, 16, device), []
    for name in ("sdpa", register_with_transformers()):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], **SAME_ROUNDING[device])


def test_a_compiled_model_is_one_graph() -> None:
    model, ids = mistral().eval(), tokens(2, 16, "cpu")
    model.set_attn_implementation(register_with_transformers())
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits)


def qkv(queries: int = 5, keys: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)


@pytest.mark.parametrize(
    "strange",
    [
        {"position_bias": torch.zeros(1, 4, 5, 5)},
        {"output_attentions": True},
        {"cache": object()},
        {"never_heard_of": 1},
    ],
    ids=lambda strange: next(iter(strange)),
)
def test_what_is_not_served_is_refused_by_name(strange: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(strange))):
        transformers_attention(SimpleNamespace(is_causal=True), *qkv(), None, **strange)  # type: ignore[arg-type]


def test_what_changes_nothing_is_taken() -> None:
    module: Any = SimpleNamespace(is_causal=True)
    harmless = {"softcap": None, "output_attentions": False, "use_cache": True, "position_ids": torch.arange(5)}
    one_sequence = {"cu_seq_lens_q": torch.tensor([0, 5]), "max_length_q": 5}
    taken, _ = transformers_attention(module, *qkv(), None, **harmless, **one_sequence)
    torch.testing.assert_close(taken, transformers_attention(module, *qkv(), None)[0])


def test_the_keyword_outranks_the_module() -> None:
    module: Any = SimpleNamespace(is_causal=True)
    query, key, value = qkv()
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    taken, weights = transformers_attention(module, query, key, value, None, is_causal=False)
    torch.testing.assert_close(taken, wanted.transpose(1, 2))
    assert weights is None
    assert taken.is_contiguous()


@pytest.mark.parametrize(("queries", "keys", "window"), [(1, 9, 3), (9, 9, 3), (9, 5, 6)])
def test_a_window_without_a_mask_is_kept(queries: int, keys: int, window: int) -> None:
    module: Any = SimpleNamespace(is_causal=True)
    query, key, value = qkv(queries, keys)
    pairs = torch.ones(9, keys, dtype=torch.bool).tril().triu(1 - window)[-queries:]
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, pairs, enable_gqa=True)
    taken, _ = transformers_attention(module, query, key, value, None, sliding_window=window)
    torch.testing.assert_close(taken, wanted.transpose(1, 2))


@pytest.mark.parametrize("window", [0, -1, -(2**40)])
def test_a_window_without_keys_is_refused(window: int) -> None:
    with pytest.raises(UsageError, match=f"`sliding_window >= 1` must hold, but got {window}"):
        transformers_attention(SimpleNamespace(is_causal=True), *qkv(4, 9), None, sliding_window=window)  # type: ignore[arg-type]


def test_a_window_without_direction_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="sliding_window"):
        transformers_attention(SimpleNamespace(is_causal=False), *qkv(4, 9), None, sliding_window=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["my_flash", "sdpa2", "org/kernel", "paged|blocktune", ""])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name an attention"):
        register_with_transformers(name)


def test_without_transformers_the_extra_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ImportError, match=r"transformers 4\.53 or newer.*pip install 'blocktune\[huggingface\]'"):
        register_with_transformers()
