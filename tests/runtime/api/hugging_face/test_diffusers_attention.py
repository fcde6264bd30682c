"""The dispatcher of diffusers with our backend: calls and tiny models of images and videos, as with its native one."""

import copy
import pickle
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import Dispatcher
from blocktune.integrations import register_with_diffusers

pytestmark = [
    pytest.mark.triton_free,
    pytest.mark.skipif(find_spec("diffusers") is None, reason="the diffusers integration needs diffusers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUNDS = {"cpu": 1e-5, "cuda": 2e-2}
"""Of the norm of a difference over that of the result: float32 there, bfloat16 here."""

HEADS, TEXT, TOKENS = 3, 24, 88
"""Text and image go into one call; those of Flux and Wan are 512 next to 4096 and 32760 tokens."""


@pytest.fixture(autouse=True)
def backend() -> Iterator[str]:
    """The active backend is one of the process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry._active_backend
    yield register_with_diffusers()
    _AttentionBackendRegistry.set_active_backend(before)


def qkv(device: str, dim: int, keys: int = TEXT + TOKENS) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sizes = ((2, length, HEADS, dim) for length in (TEXT + TOKENS, keys, keys))
    return tuple(torch.randn(size).to(device, dtype).requires_grad_() for size in sizes)


def dispatched(name: str, *tensors: Tensor, **options: Any) -> Tensor:
    """The import takes seconds, which most runs of tests have no use for."""
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    with attention_backend(name):
        out: Tensor = dispatch_attention_fn(*tensors, **options)
    return out


def text_mask(kind: str, keys: int) -> Tensor | None:
    """Which keys are text or image; one of the two prompts leaves most of its text empty."""
    kept = torch.ones(2, keys, dtype=torch.bool)
    kept[0, 5:TEXT] = False
    if kind == "additive":
        return torch.zeros(2, 1, 1, keys).masked_fill(~kept[:, None, None], float("-inf"))
    return {"none": None, "of keys": kept, "of heads": kept[:, None, None], "of pairs": _pairs(kept)}[kind]


def _pairs(kept: Tensor) -> Tensor:
    return kept[:, None, None].expand(-1, 1, TEXT + TOKENS, -1).contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["none", "of keys", "of heads", "of pairs", "additive"])
@pytest.mark.parametrize(("dim", "keys"), [(64, TEXT + TOKENS), (128, TEXT + TOKENS), (128, TEXT)])
def test_calls_are_those_of_the_native_backend(dim: int, keys: int, mask: str, device: str) -> None:
    """Self-attention of text and image, and attention to text alone; results and gradients."""
    tensors, seen = qkv(device, dim, keys), text_mask(mask, keys)
    if seen is not None:
        seen = seen.to(device, tensors[0].dtype if mask == "additive" else None)
    results = []
    for name in ("native", "blocktune"):
        out = dispatched(name, *tensors, attn_mask=seen, scale=0.2)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for theirs, ours in zip(*results, strict=True):
        assert (ours - theirs).norm() <= BOUNDS[device] * theirs.norm()


def flux() -> tuple[Any, dict[str, Any]]:
    from diffusers import FluxTransformer2DModel

    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    widths = {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.ones(1),
        "img_ids": torch.randint(4, (16, 3)),
        "txt_ids": torch.zeros(8, 3),
    }
    return FluxTransformer2DModel(**sizes, **widths), inputs


def wan() -> tuple[Any, dict[str, Any]]:
    from diffusers import WanTransformer3DModel

    sizes = {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2}
    widths = {
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "rope_max_seq_len": 32,
    }
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.ones(1, dtype=torch.long),
        "encoder_hidden_states": torch.randn(1, 6, 16),
    }
    return WanTransformer3DModel(**sizes, **widths), inputs


def qwen_image() -> tuple[Any, dict[str, Any]]:
    """A model that masks its text."""
    from diffusers import QwenImageTransformer2DModel

    sizes = {"patch_size": 2, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    widths = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}
    kept = torch.ones(1, 7, dtype=torch.bool)
    kept[:, 4:] = False
    inputs = {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "encoder_hidden_states_mask": kept,
        "timestep": torch.ones(1),
        "img_shapes": [(1, 4, 4)],
    }
    return QwenImageTransformer2DModel(**sizes, **widths), inputs


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [flux, wan, qwen_image])
@pytest.mark.parametrize("compiled", [False, True])
def test_models_compute_the_same(make: Callable[[], tuple[Any, dict[str, Any]]], compiled: bool) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    results = []
    for name in ("native", "blocktune"):
        torch.compiler.reset()
        model.set_attention_backend(name)
        with torch.no_grad():
            results.append(run(**inputs, return_dict=False)[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_the_dispatcher_that_was_registered_is_called() -> None:
    calls = []

    class Counting(Dispatcher):
        def __call__(self, *arguments: Any, **options: Any) -> Tensor:
            calls.append(arguments[3])
            return super().__call__(*arguments, **options)

    name = register_with_diffusers(dispatcher=Counting())
    dispatched(name, *qkv("cpu", 64), attn_mask=text_mask("of keys", TEXT + TOKENS))
    assert [mask.shape for mask in calls] == [(2, 1, 1, TEXT + TOKENS)]


def test_a_backend_is_restored_and_known_by_its_value() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend

    ours = AttentionBackendName("blocktune")
    assert ours in list(AttentionBackendName)
    assert pickle.loads(pickle.dumps(ours)) is copy.deepcopy(ours) is ours
    before = _AttentionBackendRegistry._active_backend
    with attention_backend("blocktune"):
        assert _AttentionBackendRegistry._active_backend is ours
    assert _AttentionBackendRegistry._active_backend is before


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Take the backend 'native'"):
        dispatched("blocktune", *qkv("cpu", 64), parallel_config=object())
