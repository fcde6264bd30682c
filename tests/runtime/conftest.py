"""What tests of the production path share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's own."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread: on a busy machine several wait for each other for longer than for a store, and
    a forked child has none of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
