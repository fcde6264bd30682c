"""Python's garbage collector passes over what stays anyway: the modules and the tests that were collected.

Those are a million objects, which every full collection of the tests' own would walk: a tenth of their time.
"""

import gc
from collections.abc import Generator
from typing import Any

import pytest

YOUNG, MIDDLE, OLD = 10_000, 20, 20
"""After how many new objects, and collections of the younger generation, each generation is collected."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect the tests without the garbage collector, which then leaves alone all that there is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, OLD)
        gc.enable()
