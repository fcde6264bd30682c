"""A test draws the same random numbers in every run, whatever ran before it and however busy the machine is.

`make fuzz` and `make fuzz-cli` look for new cases: they name the seed of what they find.
"""

import random
import sys
import zlib

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the generators with the test's name, before its fixtures draw from them."""
    seed = zlib.crc32(f"{item.location[0]}::{item.location[2]}".encode())  # its id may name a group of xdist's as well
    random.seed(seed)
    torch = sys.modules.get("torch")
    if hasattr(torch, "manual_seed"):  # the thread of a server may be importing it
        torch.manual_seed(seed)
