"""Blocks of image and video models, and their attention alone, with each backend of diffusers' dispatcher."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from blocktune.integrations import register_with_diffusers
from tools.end_to_end.rows import BOUNDS, DisagreementError, Lab
from tools.end_to_end.turns import Run, Timed, in_turns

BACKENDS = ("blocktune", "native", "_native_cudnn", "_native_flash", "_native_efficient")
"""Ours first; `native` is PyTorch's own choice, with which results are compared."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a block is called with; `text` tokens are part of the sequence in Flux, and apart from it in Wan.

    inner: elements of a token within Wan's feed-forward net.
    """

    heads: int
    head_dim: int
    tokens: int
    text: int
    inner: int = 0

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.heads * self.head_dim


SIZES = {
    "Flux, double block": Sizes(24, 128, 4096, 512),
    "Wan 1.3B, block": Sizes(12, 128, 32760, 512, 8960),
    "Wan 14B, block": Sizes(40, 128, 32760, 512, 13824),
    "attention, 128 columns": Sizes(24, 128, 4096, 512),
    "attention, 64 columns": Sizes(24, 64, 4096, 512),
    "attention, 128 columns, text mask": Sizes(24, 128, 4096, 512),
    "attention, 64 columns, text mask": Sizes(24, 64, 4096, 512),
}


@dataclass(frozen=True, slots=True)
class BlockRow:
    """What was measured of a block. refused: why a backend has no times."""

    block: str
    sizes: Sizes
    timed: Timed
    refused: dict[str, str] = field(default_factory=dict)


def import_diffusers() -> str:
    """Import diffusers, which needs Pillow for images that nothing here makes: where there is none, with a stand-in.

    Returns:
        its version.
    """
    if find_spec("PIL") is None:
        stand_in = MagicMock(__version__="12.0.0", __spec__=None)
        sys.modules.update(dict.fromkeys(("PIL", "PIL.Image", "PIL.ImageOps"), stand_in))
    from diffusers import __version__

    register_with_diffusers()
    return str(__version__)


def block_rows(lab: Lab, sizes: dict[str, Sizes]) -> Iterator[BlockRow]:
    """Yield the rows of all blocks; diffusers is imported."""
    for name, own in sizes.items():
        kind, _, _ = name.partition(" ")
        make = {"Flux,": flux_block, "Wan": wan_block}.get(kind)
        call = attention_call(lab, own, masked="mask" in name) if make is None else make(lab, own)
        yield block_row(lab, name, own, call)


def block_row(lab: Lab, name: str, sizes: Sizes, call: Callable[[], Tensor]) -> BlockRow:
    """Time a call with every backend, after a look at its results.

    Raises:
        DisagreementError: a backend's results are not those of PyTorch's choice.
    """
    expected, refused, runs = _with_backend("native", call)(), {}, {}
    for backend in BACKENDS:
        run = _with_backend(backend, call)
        try:
            found = run()
        except (RuntimeError, ValueError) as error:
            if backend == BACKENDS[0]:
                raise
            refused[backend] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        apart = float((found.float() - expected.float()).norm() / expected.float().norm())
        if not apart <= BOUNDS[lab.dtype]:
            raise DisagreementError(f"{backend} differs from native by {apart:.2e} in {name}")
        runs[backend] = Run(lambda: None, run)
    return BlockRow(name, sizes, in_turns(runs, lab.device, lab.rounds, lab.steps), refused)


def _with_backend(name: str, call: Callable[[], Tensor]) -> Callable[[], Any]:
    from diffusers.models.attention_dispatch import attention_backend

    def run() -> Tensor:
        with attention_backend(name), torch.no_grad():
            return call()

    return run


def _noise(lab: Lab, *size: int) -> Tensor:
    return torch.randn(size, device=lab.device, dtype=lab.dtype)


def _turns(lab: Lab, tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, head_dim // 2, device=lab.device).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def flux_block(lab: Lab, sizes: Sizes) -> Callable[[], Tensor]:
    """Return a call of one of Flux's blocks for image and text: 4096 tokens are an image of 1024 pixels square."""
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    torch.manual_seed(0)
    with lab.device:
        block = FluxTransformerBlock(sizes.width, sizes.heads, sizes.head_dim).to(lab.dtype).eval()
    image, text, time = (_noise(lab, 1, *size, sizes.width) for size in ((sizes.tokens,), (sizes.text,), ()))
    turns = _turns(lab, sizes.text + sizes.tokens, sizes.head_dim)
    return lambda: block(image, text, time, image_rotary_emb=turns)[1]


def wan_block(lab: Lab, sizes: Sizes) -> Callable[[], Tensor]:
    """Return a call of one of Wan's blocks: 32760 tokens are 81 frames of 832 x 480."""
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    torch.manual_seed(0)
    with lab.device:
        block = WanTransformerBlock(sizes.width, sizes.inner, sizes.heads, cross_attn_norm=True).to(lab.dtype).eval()
    video, text = _noise(lab, 1, sizes.tokens, sizes.width), _noise(lab, 1, sizes.text, sizes.width)
    time = _noise(lab, 1, 6, sizes.width)
    turns = tuple(each[None, :, None].to(lab.dtype) for each in _turns(lab, sizes.tokens, sizes.head_dim))
    return lambda: block(video, text, time, turns)


def attention_call(lab: Lab, sizes: Sizes, *, masked: bool) -> Callable[[], Tensor]:
    """Return a call of attention alone, of which half of the text may be empty."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    torch.manual_seed(0)
    length = sizes.text + sizes.tokens
    tensors = [_noise(lab, 1, length, sizes.heads, sizes.head_dim) for _ in range(3)]
    kept = torch.ones(1, length, dtype=torch.bool, device=lab.device)
    kept[:, sizes.text // 2 : sizes.text] = False
    mask = kept[:, None, None] if masked else None  # the form that every backend takes
    return lambda: dispatch_attention_fn(*tensors, attn_mask=mask)
