"""The fake H200 of the tests of the tuner."""

from tests.tuner.drop_in.conftest import compiler, gpu, path

__all__ = ["compiler", "gpu", "path"]
