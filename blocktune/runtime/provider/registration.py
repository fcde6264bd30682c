"""The provider `blocktune` in PyTorch's registry of FlashAttention implementations: `torch.nn.attention`.

An implementation replaces the CUDA kernels of ops, below autograd; PyTorch's own `_fa4.py` is the pattern. PyTorch
still decides by its own rules which op it calls. What our kernels do not compute goes on to the kernel that was there
before, so nothing is lost.

The ops are no public interface: an op whose schema is not known here stays PyTorch's.
"""

import warnings
from functools import partial
from typing import TYPE_CHECKING

from torch.library import Library
from torch.nn import attention as registry

from blocktune.runtime.provider import PROVIDER
from blocktune.runtime.provider.flash_ops import worker_backward, worker_forward, worker_forward_into
from blocktune.runtime.provider.replacement import LateServer, ReplacedOp, Replacement, warn_of_drift
from blocktune.runtime.provider.sdpa_ops import cudnn_backward, cudnn_forward, flash_backward, flash_forward
from blocktune.runtime.provider.varlen_ops import varlen_backward, varlen_forward, varlen_forward_into

if TYPE_CHECKING:
    from blocktune.runtime.dispatch.dispatcher import Dispatcher

ATEN, VARLEN = "aten", "torch_attn"

THREE = "Tensor Tensor Tensor"
NINE = "Tensor Tensor Tensor Tensor int int Tensor Tensor Tensor"

OPS = (
    ReplacedOp(ATEN, "_scaled_dot_product_flash_attention", flash_forward, NINE),
    ReplacedOp(ATEN, "_scaled_dot_product_flash_attention_backward", flash_backward, THREE),
    ReplacedOp(ATEN, "_scaled_dot_product_cudnn_attention", cudnn_forward, NINE),
    ReplacedOp(ATEN, "_scaled_dot_product_cudnn_attention_backward", cudnn_backward, THREE),
    ReplacedOp(ATEN, "_flash_attention_forward", worker_forward, f"{THREE} Tensor Tensor"),
    ReplacedOp(ATEN, "_flash_attention_forward_no_dropout_inplace", worker_forward_into, "Tensor"),  # torch 2.12
    ReplacedOp(ATEN, "_flash_attention_backward", worker_backward, THREE),
    ReplacedOp(VARLEN, "_varlen_attn", varlen_forward, THREE),
    ReplacedOp(VARLEN, "_varlen_attn_out", varlen_forward_into, "Tensor"),
    ReplacedOp(VARLEN, "_varlen_attn_backward", varlen_backward, THREE),
)
"""The ops that are replaced, with the schemas of torch 2.11 to 2.15."""


class Handle:
    """Keeps kernels in place until it is removed."""

    def __init__(self, libraries: tuple[Library, ...]) -> None:
        self._libraries = libraries

    def remove(self) -> None:
        """Restore the kernels that were there before, since nothing else holds the libraries."""
        self._libraries = ()


def replace_ops(key: str = "CUDA", *, late: LateServer | None = None) -> Handle:
    """Replace the kernels under one dispatch key by a server's, by default this process's dispatcher."""
    libraries = {namespace: Library(namespace, "IMPL", key) for namespace in (ATEN, VARLEN)}
    late = late or LateServer()
    defined = [op for op in OPS if op.is_defined]
    drifted = [op for op in defined if op.drift() is not None]
    warn_of_drift(drifted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*[Oo]verrid")  # the override is intended
        for op in OPS:
            if op not in drifted and (op in defined or op.namespace == VARLEN):
                replacement = Replacement(op, key, late)
                libraries[op.namespace].impl(op.name, replacement, key, with_keyset=True, allow_override=True)
    return Handle(tuple(libraries.values()))


def register_provider(dispatcher: "Dispatcher | None" = None) -> None:
    """Register the name, which from then on stands for this dispatcher; nothing is active before it is asked for."""
    registry.register_flash_attention_impl(PROVIDER, register_fn=partial(replace_ops, late=LateServer(dispatcher)))


def replace_sdpa_flash(*, dispatcher: "Dispatcher | None" = None) -> None:
    """Let PyTorch's attention from now on call our kernels, with a dispatcher's configs: the older name of
    `torch.nn.attention.activate_flash_attention_impl("blocktune")`.

    It holds for the whole process until `restore_sdpa_flash`; an implementation that another library had activated is
    ended. dispatcher: whose configs serve the calls, by default `blocktune.attention`.
    """
    register_provider(dispatcher)
    registry.activate_flash_attention_impl(PROVIDER)


def restore_sdpa_flash() -> None:
    """Restore PyTorch's own kernels; nothing happens if another implementation than ours is active."""
    if registry.current_flash_attention_impl() == PROVIDER:
        registry.restore_flash_attention_impl()
