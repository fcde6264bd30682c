"""What the process that measures does while the first config is compiled."""

import pytest

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.measure.worker import read_sources

HOPPER = limits_for((9, 0))


@pytest.mark.parametrize("direction", Direction)
def test_sources_are_read_before_the_first_launch(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(
        batch=1, num_heads=2, num_heads_kv=2, seqlen_q=256, seqlen_k=256, head_dim=64, direction=direction
    )
    kernel = kernels_for(shape, HOPPER)[0]
    config = kernel.default_config(shape, HOPPER)
    functions = [spec.function for spec in (kernel.compile_spec(config, shape), *kernel.further_specs(config, shape))]
    for function in functions:
        monkeypatch.setattr(function, "hash", None)
    read_sources(kernel, shape, HOPPER)
    assert all(len(function.hash) == 64 for function in functions)
