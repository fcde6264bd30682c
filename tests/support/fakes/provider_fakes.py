"""PyTorch's attention ops on the CPU, where none has a kernel: ours over stand-ins for PyTorch's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.provider.registration import ATEN, OPS, replace_ops
from blocktune.runtime.provider.replacement import LateServer
from tests.support.fakes.dispatch_fakes import ListSource


class Standins:
    """PyTorch's kernels of aten's ops: each notes its name and arguments, and returns numbers that name it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    @property
    def names(self) -> list[str]:
        """The ops that were called."""
        return [name for name, *_ in self.calls]

    def kernel(self, name: str) -> Any:
        """The kernel of an op."""

        def compute(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            if name.endswith("backward"):
                return tuple(torch.full_like(tensor, 3.0) for tensor in arguments[1:4])
            query = next(tensor for tensor in arguments if isinstance(tensor, Tensor))
            sums = query.new_zeros(query.shape[:-1], dtype=torch.float32)
            if name.endswith("inplace"):
                query.fill_(7.0)
                return sums
            out, number = torch.full_like(query, 7.0), torch.tensor(9, dtype=torch.int64)
            if name == "_flash_attention_forward":
                return out, sums, number, number, query.new_empty(0)
            return out, sums, None, None, query.shape[2], query.shape[2], number, number, None

        return compute


@contextmanager
def provided(
    standins: Standins | None = None, dispatcher: Dispatcher | None = None, late: LateServer | None = None
) -> Iterator[Dispatcher]:
    """Replace the ops' kernels on the CPU, above those of the stand-ins; the dispatcher knows no measurement."""
    dispatcher = Dispatcher(ListSource()) if dispatcher is None else dispatcher
    with torch.library._scoped_library(ATEN, "IMPL") as library:
        for op in OPS:
            if standins is not None and op.namespace == ATEN:
                library.impl(op.name, standins.kernel(op.name), "CPU")
        handle = replace_ops("CPU", late=late or LateServer(dispatcher))
        try:
            yield dispatcher
        finally:
            handle.remove()
