"""A store with one winner, and a registry of one kernel that can be had for reading it."""

from pathlib import Path

import pytest

from blocktune.kernels import registry
from tests.support.fakes.dispatch_fakes import PlainKernel, best, config, shape_like, store_with


@pytest.fixture
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `PlainKernel` the only kernel that stored configs may name."""
    monkeypatch.setattr(registry, "KERNELS", {"plain": PlainKernel()})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store whose only winner is of the usual shape."""
    return store_with(tmp_path / "store.db", best(shape_like(), config()))
