"""torch.distributed.tensor.experimental.context_parallel, called as the bench calls our own.

It replaces a name of torch.nn.functional, so that only calls through that module reach it, and needs a buffer to split.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
FAILURES = (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError, LookupError)
"""What PyTorch raises of sizes and types that one of its ways does not take."""


def name_of(backend: str, *, grouped: bool) -> str:
    """Return how rows name this way of PyTorch's. grouped: keys travel as they are; else once for each query head."""
    return f"PyTorch {backend}" + ("" if grouped else ", keys repeated")


@contextmanager
def context_parallel_of(mesh: DeviceMesh, backend: str) -> Iterator[None]:
    """Let `attend` share a sequence over a mesh within the block, by a backend of PyTorch's."""
    from torch.distributed.tensor.experimental import context_parallel

    marker = torch.zeros(2 * mesh.size(), device=mesh.device_type)
    with context_parallel(mesh, buffers=[marker], buffer_seq_dims=[0]), sdpa_kernel(BACKENDS[backend]):
        yield


def attend(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> Tensor:
    """Return causal attention of this rank's queries."""
    options: dict[str, Any] = {"is_causal": True}
    if grouped:
        options["enable_gqa"] = True
    else:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    out: Tensor = functional.scaled_dot_product_attention(query, key, value, **options)
    return out
