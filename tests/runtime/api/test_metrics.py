"""What a dispatcher does, read from its plans when it is asked for."""

import sys
from functools import partial
from typing import Any

import pytest

from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.api.metrics import MetricsReader, PrometheusCollector, observe_with_opentelemetry
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from tests.support.fakes.dispatch_fakes import ListSource, PlainKernel, config, pretend_h200, shape_like, tensors, tuned

pytestmark = pytest.mark.triton_free


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> PlainKernel:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return pretend_h200(monkeypatch)


@pytest.fixture
def dispatcher() -> Dispatcher:
    exact, borrowed = shape_like(128), shape_like(4096)
    return Dispatcher(ListSource([tuned(exact, config()), tuned(borrowed, config(), Origin.BORROWED)]))


def call(dispatcher: Dispatcher, seqlen: int, times: int, **changes: Any) -> None:
    given = tensors(shape_like(seqlen, **changes))
    for _ in range(times):
        dispatcher(*given)


def test_calls_are_counted_by_rung(dispatcher: Dispatcher, kernel: PlainKernel) -> None:
    reader = MetricsReader(dispatcher)
    call(dispatcher, 128, 3)
    call(dispatcher, 64, 2, head_dim=256)  # no kernel runs it
    found = reader.read()
    assert (found.calls["exact"], found.calls["sdpa"], found.fallbacks) == (3, 2, 2)
    assert found.misses == 2
    call(dispatcher, 128, 1)
    assert reader.read().calls["exact"] == 4
    assert sum(reader.read().calls.values()) == 6


def test_counts_never_fall(dispatcher: Dispatcher) -> None:
    reader = MetricsReader(dispatcher)
    call(dispatcher, 128, 3)
    reader.read()
    call(dispatcher, 128, 2)
    dispatcher.reload()  # forgets its plans
    assert reader.read().calls["exact"] == 5
    call(dispatcher, 128, 1)
    assert reader.read().calls["exact"] == 6


def test_a_config_that_does_not_launch_is_disabled(dispatcher: Dispatcher, kernel: PlainKernel) -> None:
    kernel.broken = {config()}
    call(dispatcher, 128, 1)
    assert MetricsReader(dispatcher).read().disabled == 1


def test_ranks_that_decide_otherwise_have_another_digest(dispatcher: Dispatcher) -> None:
    alike = Dispatcher(dispatcher.source)
    other = Dispatcher(ListSource([tuned(shape_like(128), config(64, 4))]))
    for each in (dispatcher, alike, other):
        call(each, 128, 1)
    digests = [MetricsReader(each).read().digests for each in (dispatcher, alike, other)]
    assert digests[0] == digests[1] != digests[2]
    assert [len(digest) for digest in digests[0].values()] == [16]


def test_before_the_first_call_there_is_nothing(dispatcher: Dispatcher) -> None:
    found = MetricsReader(dispatcher).read()
    assert not any(found.calls.values())
    assert found.digests == {}


def test_prometheus_gets_them(dispatcher: Dispatcher) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    registry.register(PrometheusCollector(dispatcher))
    call(dispatcher, 128, 3)
    text = prometheus.generate_latest(registry).decode()
    assert 'blocktune_calls_total{rung="exact"} 3.0' in text
    assert "blocktune_fallbacks_total 0.0" in text
    assert 'blocktune_configs{device="nvidia h200|9.0|132",digest="' in text


def test_opentelemetry_gets_them(dispatcher: Dispatcher) -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    memory = InMemoryMetricReader()
    observe_with_opentelemetry(MeterProvider([memory]).get_meter("test"), dispatcher)
    call(dispatcher, 128, 3)
    scopes = memory.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    points = {metric.name: list(metric.data.data_points) for metric in scopes}
    assert {point.value for point in points["blocktune.calls"] if point.attributes["rung"] == "exact"} == {3}
    assert [point.value for point in points["blocktune.misses"]] == [0]
    assert len(points["blocktune.configs"]) == 1


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("prometheus_client", PrometheusCollector),
        ("opentelemetry.metrics", partial(observe_with_opentelemetry, None)),
    ],
)
def test_what_is_missing_is_named(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, module: str, make: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=r'pip install "blocktune\[metrics\]"'):
        make(dispatcher)
