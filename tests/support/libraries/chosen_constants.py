"""Kernels that a library launches with constants of its own choice, under a tuner that chooses these."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

from triton.runtime.autotuner import Config

from blocktune import autotune


class ChosenConstants:
    """Stands where a library has a jitted function: launches leave out what is tuned.

    fn: the function under the tuner.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._tuned = {name for config in fn.configs for name in config.all_kwargs()}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            return self.fn[grid](*args, **{name: value for name, value in kwargs.items() if name not in self._tuned})

        return launch


@contextlib.contextmanager
def tuned_in(
    module: ModuleType, name: str, configs: Sequence[Config], key: Sequence[str], **options: Any
) -> Iterator[None]:
    """Let the library that a module belongs to launch one of its jitted functions under `blocktune.autotune`."""
    tuned = autotune(configs, key, **options)(getattr(module, name))
    with mock.patch.object(module, name, ChosenConstants(tuned)):
        yield
