"""`install`: the tuner under every `@triton.autotune` of a process, libraries included, without a change to them.

Triton's `Autotuner.run` is replaced, so kernels that were decorated before count, too. Its constructor is replaced as
well: the first kernel that a library decorates starts the process that compiles. Templates of Inductor have a tuner of
their own and stay as they are; so does every kernel that is left out by name.
"""

import fnmatch
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.runtime.autotuner import Autotuner

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.boundary import tolerance, warn_of_failure
from blocktune.runtime.autotuned.call import jitted_function
from blocktune.runtime.autotuned.call_key import require_sequence
from blocktune.runtime.autotuned.frozen import load_frozen
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.drop_in.ahead import begin, prepare
from blocktune.tuner.drop_in.autotune import TunedAutotuner
from blocktune.tuner.drop_in.decide import decide
from blocktune.tuner.drop_in.inductor import hand_winners

_PLACE = "_blocktune_kernel"
"""The attribute of a tuner that holds what stands under it."""

logger = logging.getLogger("blocktune")

Run = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Installed:
    """The state of an installation: which kernels are meant, and how they are tuned."""

    only: tuple[str, ...]
    without: tuple[str, ...]
    settings: Settings

    def covers(self, name: str) -> bool:
        """Return whether a kernel, `module:function`, is meant."""
        named_in = not self.only or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)
        return named_in and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.without)


_installed: _Installed | None = None
_stock: dict[str, Run] = {}
"""The methods that ours replaced, by name. Those of libraries that replaced ours since may still call ours."""
_named: set[object] = set()
"""Methods of others that were named."""
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
        _installed = _Installed(tuple(only), tuple(without), settings)
        for name, ours in _ours().items():
            if name not in _stock:
                _stock[name] = getattr(Autotuner, name)
                setattr(Autotuner, name, ours)
    _name_strangers()
    hand_winners(_installed_kernel)


def uninstall() -> None:
    """Give every kernel its own tuner back; what was chosen is forgotten. Kernels of `blocktune.autotune` stay, and so
    do methods with which another library has replaced ours."""
    global _installed
    _name_strangers()
    with _lock:
        _installed = None
        for name, ours in _ours().items():
            if name in _stock and getattr(Autotuner, name) is ours:
                setattr(Autotuner, name, _stock.pop(name))


def _ours() -> dict[str, Run]:
    """Return the methods that take the place of Triton's, by name."""
    return {"run": _run, "__init__": _init}


def _name_strangers() -> None:
    """Say once which methods of other libraries replaced ours: kernels are tuned as far as those call what
    they replaced."""
    for name, ours in _ours().items():
        found = getattr(Autotuner, name)
        if name in _stock and found is not ours and found not in _named:
            _named.add(found)
            logger.warning(
                "%s.%s has replaced `Autotuner.%s` after `blocktune.install`: kernels are tuned only if it calls "
                "the method that it replaced. Call `blocktune.install` after that library is imported.",
                found.__module__,
                found.__qualname__,
                name,
            )


def _name_own_run(cls: type) -> None:
    """Say once that the kernels of a subclass of Triton's tuner keep it, since its `run` does not call Triton's."""
    run: Any = getattr(cls, "run", None)
    code = getattr(run, "__code__", None)
    if code is not None and run is not _run and "super" not in code.co_names and cls not in _named:
        _named.add(cls)
        logger.warning(
            "Kernels of %s.%s keep their own tuner, since its `run` does not call that of Triton's `Autotuner`.",
            cls.__module__,
            cls.__qualname__,
        )


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch as Triton's `Autotuner.run` does, for every tuner of the process."""
    installed = _installed
    stock = _stock.get("run", Autotuner.run)
    if installed is None:  # uninstalled since, by another thread or under a library's method
        return stock(self, *args, **kwargs)
    kernel = _kernel_under(self, installed)
    if kernel is None:
        return stock(self, *args, **kwargs)
    return self.fn.run(*args, **kwargs, **kernel.options(args, kwargs))


def _installed_kernel(tuner: Any) -> TunedKernel | None:
    """Return what stands under a tuner now; None where nothing does."""
    installed = _installed
    return None if installed is None else _kernel_under(tuner, installed)


def _kernel_under(tuner: Any, installed: _Installed) -> TunedKernel | None:
    """Return what replaces a tuner, made for this installation; None if it stays as it is."""
    kernel: TunedKernel | None
    held, kernel = tuner.__dict__.get(_PLACE, (None, None))
    if held is not installed:
        kernel = _kernel_of(tuner, installed)
        setattr(tuner, _PLACE, (installed, kernel))
    return kernel


@functools.wraps(Autotuner.__init__)  # PyTorch's compiler reads its arguments
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a tuner as Triton does, and let the package of its kernel be imported where it will be compiled."""
    installed = _installed
    _stock.get("__init__", Autotuner.__init__)(self, *args, **kwargs)
    if installed is None:  # uninstalled since, by another thread or under a library's method
        return
    _name_strangers()
    if not isinstance(self, TunedAutotuner):
        _name_own_run(type(self))
    name = f"{self.base_fn.__module__}:{self.base_fn.__qualname__}"
    if installed.covers(name) and not knobs.runtime.interpret:
        with tolerance(name, "a process that compiles"):
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
