"""`install`: the tuner under every `@triton.autotune` of a process, libraries included, without a change to them.

Triton's `Autotuner.run` is replaced, so kernels that were decorated before count, too. Its constructor is replaced as
well: the first kernel that a library decorates starts the process that compiles. Templates of Inductor have a tuner of
their own and stay as they are; so does every kernel that is left out by name.
"""

import fnmatch
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.runtime.autotuner import Autotuner

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.boundary import warn_of_failure
from blocktune.runtime.autotuned.call import jitted_function
from blocktune.runtime.autotuned.call_key import require_sequence
from blocktune.runtime.autotuned.frozen import load_frozen
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.drop_in.ahead import begin, prepare
from blocktune.tuner.drop_in.autotune import TunedAutotuner
from blocktune.tuner.drop_in.decide import decide

_PLACE = "_blocktune_kernel"
"""The attribute of a tuner that holds what stands under it."""

Run = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Installed:
    """The state of an installation: Triton's own methods, which kernels are meant, and how they are tuned."""

    stock: Run
    stock_init: Run
    only: tuple[str, ...]
    without: tuple[str, ...]
    settings: Settings

    def covers(self, name: str) -> bool:
        """Return whether a kernel, `module:function`, is meant."""
        named_in = not self.only or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)
        return named_in and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.without)


_installed: _Installed | None = None
_lock = threading.Lock()


def install(
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    settings: Settings | None = None,
    frozen: str | None = None,
) -> None:
    """Tune every kernel under `@triton.autotune` of this process from now on; a second call changes how.

    Where nothing was tuned on this GPU before, the process that compiles begins at once: call this early.

    Args:
        only: names of the kernels that are meant, `module:function` with wildcards; all unless given.
        without: names of kernels that stay with Triton's own tuner.
        settings: how kernels are tuned.
        frozen: a frozen file whose winners precede the store.

    Raises:
        UsageError: `only` or `without` is a text instead of a sequence, `settings` is no `Settings`, or the frozen file
            is not in order.
    """
    settings = settings or Settings()
    install_without_compiler(only=only, without=without, settings=settings, frozen=frozen)
    begin(settings)


def install_without_compiler(
    *, only: Sequence[str], without: Sequence[str], settings: Settings, frozen: str | None
) -> None:
    """Install, and leave the process that compiles to the first kernel: arguments and errors as of `install`."""
    global _installed
    require_sequence("only", only)
    require_sequence("without", without)
    if not isinstance(settings, Settings):
        raise UsageError(f"`settings` must be of `blocktune.Settings`, but got {settings!r:.200}. Write Settings(...).")
    if frozen is not None:
        load_frozen(frozen)
    with _lock:
        stock = (Autotuner.run, Autotuner.__init__)
        if _installed is not None:
            stock = (_installed.stock, _installed.stock_init)
        _installed = _Installed(*stock, tuple(only), tuple(without), settings)
        Autotuner.run, Autotuner.__init__ = _run, _init


def uninstall() -> None:
    """Give every kernel its own tuner back; what was chosen is forgotten. Kernels of `blocktune.autotune` stay."""
    global _installed
    with _lock:
        if _installed is not None:
            Autotuner.run, Autotuner.__init__ = _installed.stock, _installed.stock_init
            _installed = None


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch as Triton's `Autotuner.run` does, for every tuner of the process."""
    installed = _installed
    if installed is None:  # uninstalled by another thread since
        return Autotuner.run(self, *args, **kwargs)
    held, kernel = self.__dict__.get(_PLACE, (None, None))
    if held is not installed:
        kernel = _kernel_of(self, installed)
        setattr(self, _PLACE, (installed, kernel))
    if kernel is None:
        return installed.stock(self, *args, **kwargs)
    return self.fn.run(*args, **kwargs, **kernel.options(args, kwargs))


@functools.wraps(Autotuner.__init__)  # PyTorch's compiler reads its arguments
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a tuner as Triton does, and let the package of its kernel be imported where it will be compiled."""
    installed = _installed
    if installed is None:  # uninstalled by another thread since
        Autotuner.__init__(self, *args, **kwargs)
        return
    installed.stock_init(self, *args, **kwargs)
    name = f"{self.base_fn.__module__}:{self.base_fn.__qualname__}"
    if installed.covers(name) and not knobs.runtime.interpret:
        prepare(name, installed.settings)


def _kernel_of(tuner: Any, installed: _Installed) -> TunedKernel | None:
    """Return what replaces a tuner; None if it stays as it is, as one of something that is not jitted does."""
    try:
        function = jitted_function(tuner.fn).fn
    except UsageError as error:
        warn_of_failure("A kernel", "this tuner", error)
        return None
    name = f"{function.__module__}:{function.__qualname__}"
    if isinstance(tuner, TunedAutotuner) or not installed.covers(name):
        return None
    return TunedKernel(tuner, installed.settings, decide)
