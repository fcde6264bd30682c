"""The names that users import."""

import importlib.metadata

import pytest

import blocktune
from blocktune.kernels.config import KernelConfig
from blocktune.kernels.dispatch import Dispatcher, attention, best_config
from blocktune.kernels.shape import AttentionShape


def test_all_public_names_exist_and_are_those_of_the_rooms() -> None:
    public = {name: getattr(blocktune, name) for name in blocktune.__all__}
    assert public == {
        "AttentionShape": AttentionShape,
        "Dispatcher": Dispatcher,
        "KernelConfig": KernelConfig,
        "__version__": importlib.metadata.version("blocktune"),
        "attention": attention,
        "best_config": best_config,
    }


def test_dir_lists_them() -> None:
    assert set(blocktune.__all__) <= set(dir(blocktune))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = blocktune.atention  # type: ignore[attr-defined]
