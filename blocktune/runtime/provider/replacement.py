"""A kernel of ours above the one that an op had, which computes what ours does not."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.library import get_kernel

if TYPE_CHECKING:
    from blocktune.runtime.dispatch.dispatcher import Dispatcher
    from blocktune.runtime.provider.server import OpServer

logger = logging.getLogger("blocktune")

OTHER_KEY = "XPU"
"""A dispatch key for which nothing is registered here: there an op that is written in Python has its own kernel."""

VIEWS = DispatchKeySet(DispatchKey.ADInplaceOrView)
"""The key that makes views what they are to autograd. PyTorch leaves it in place below ops that are written in Python,
where an output that is a view could not be written to."""


class LateServer:
    """The server of a dispatcher, by default this process's. It is made by the first call: loading all that it needs
    takes seconds, and most processes that have the provider active compute no attention."""

    def __init__(self, dispatcher: "Dispatcher | None" = None) -> None:
        self._dispatcher = dispatcher

    @cached_property
    def server(self) -> "OpServer":
        """The server."""
        from blocktune.runtime.dispatch.dispatcher import attention
        from blocktune.runtime.provider.server import Server

        return Server(attention if self._dispatcher is None else self._dispatcher)


class LateObserver(LateServer):
    """An observer, made by the first call as well."""

    @cached_property
    def server(self) -> "OpServer":
        """The observer."""
        from blocktune.runtime.provider.observer import Observer

        return Observer()


@dataclass(frozen=True, slots=True)
class ReplacedOp:
    """An op, the function that stands for it, and the types of its results.

    The function has the op's arguments behind a server, and returns None for what it leaves to PyTorch.
    """

    namespace: str
    name: str
    serve: Callable[..., Any]
    results: str

    @property
    def label(self) -> str:
        """The op's name in PyTorch."""
        return f"{self.namespace}::{self.name}"

    @property
    def is_defined(self) -> bool:
        """Whether this process has the op; those of `torch_attn` come with `import torch.nn.attention.varlen`."""
        return hasattr(getattr(torch.ops, self.namespace), self.name)

    def drift(self) -> str | None:
        """Return the schema of this PyTorch's op if the function does not fit it."""
        schema = getattr(getattr(torch.ops, self.namespace), self.name).default._schema
        return None if self.fits(schema) else str(schema)

    def fits(self, schema: torch.FunctionSchema) -> bool:
        """Return whether the function knows all arguments of a schema, each in its place, and has its results."""
        known = list(inspect.signature(self.serve).parameters)[1:]
        given = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        named = {argument.name for argument in schema.arguments if argument.kwarg_only}
        results = " ".join(str(result.type) for result in schema.returns)
        return known[: len(given)] == given and named <= set(known[len(given) :]) and results == self.results


class Replacement:
    """The kernel of an op for one dispatch key: ours where it serves the call, else the one that was there."""

    def __init__(self, op: ReplacedOp, key: str, late: LateServer) -> None:
        self._op, self._late, self._serve = op, late, op.serve
        self._before = _kernel_of(op, key) if op.is_defined else None
        self._is_checked = op.is_defined

    def __call__(self, keys: Any, *arguments: Any, **options: Any) -> Any:
        """Return the op's results.

        Raises:
            NotImplementedError: no kernel of ours serves the call, and there was none before.
        """
        if not self._is_checked:
            self._check_late()
        with _ExcludeDispatchKeyGuard(VIEWS):
            found = self._serve(self._late.server, *arguments, **options)
        if found is not None:
            return found
        if self._before is None:
            raise NotImplementedError(
                f"no kernel of blocktune serves this call of {self._op.label}, nor one of PyTorch's"
            )
        return self._before.call_boxed(keys, *arguments, **options)

    def _check_late(self) -> None:
        """Look at an op that was not there when its kernel was registered."""
        self._before = _kernel_of(self._op, OTHER_KEY)
        if self._op.drift() is not None:
            warn_of_drift([self._op])
            self._serve = _leave
        self._is_checked = True


def warn_of_drift(ops: list[ReplacedOp]) -> None:
    """Say in one warning which ops are left to PyTorch, since they are others than those that are known here."""
    if ops:
        logger.warning(
            "PyTorch keeps its own kernels of these ops, whose schemas in torch %s are not known here: %s. Update "
            "blocktune, or call `blocktune.attention`.",
            torch.__version__,
            "; ".join(str(op.drift()) for op in ops),
        )


def _kernel_of(op: ReplacedOp, key: str) -> Any:
    """Return the kernel that computes an op for a dispatch key, None where there is none."""
    try:
        return get_kernel(op.label, key)
    except RuntimeError:  # of a PyTorch without this device
        return None


def _leave(*arguments: Any, **options: Any) -> None:
    """Leave a call to PyTorch."""
    del arguments, options
