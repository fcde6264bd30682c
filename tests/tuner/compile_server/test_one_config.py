"""A config that a person asks for is waited for longer than one of many."""

from concurrent.futures import Future
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile_server import one_config
from blocktune.tuner.compile_server.farm import COMPILE_TIMEOUT_S


class SlowFarm:
    """A farm whose every compile takes too long."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __enter__(self) -> "SlowFarm":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, _: str, config: KernelConfig, *job: Any) -> "Future[CompileResult]":
        done: Future[CompileResult] = Future()
        said = f"more than {self.options['timeout_s']:g} s"
        done.set_result(CompileResult(config=config, outcome=Outcome.COMPILE_TIMEOUT, error=said))
        return done


def test_it_has_minutes_and_says_when_they_were_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_config, "CompileFarm", SlowFarm)
    limits = device_named("t4").limits
    shape = AttentionShape(batch=1, num_heads=1, seqlen_q=128, head_dim=64)
    config = get_kernel("flash_fwd").default_config(shape, limits)
    assert config is not None
    assert one_config.TIMEOUT_S > COMPILE_TIMEOUT_S
    with pytest.raises(NoFeasibleConfigError, match=rf"more than {one_config.TIMEOUT_S:g} s"):
        one_config.compile_config(config, shape, limits)
