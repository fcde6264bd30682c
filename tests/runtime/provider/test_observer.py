"""BLOCKTUNE_RECORD in a program that calls PyTorch's attention: its shapes are recorded, and PyTorch computes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from blocktune import autoload
from blocktune.cli.shared.shapes_file import flags_of_file
from blocktune.kernels.files import shape_record
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.provider import observer
from blocktune.runtime.provider.replacement import LateObserver
from tests.support.fakes.dispatch_fakes import ListSource, pretend_h200, shape_like, tensors
from tests.support.fakes.feature_fakes import pretend_features
from tests.support.fakes.provider_fakes import Standins, provided

pytestmark = pytest.mark.triton_free

aten = torch.ops.aten


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("BLOCKTUNE_RECORD", str(tmp_path / "shapes.toml"))
    shape_record._record.cache_clear()
    yield tmp_path / "shapes.toml"
    shape_record._record.cache_clear()


def written(path: Path) -> list[AttentionShape]:
    record = shape_record._record()
    assert record is not None
    record.write()
    return [flags.shape() for flags in flags_of_file(path)]


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standins]:
    pretend_features(monkeypatch)
    made = Standins()
    with provided(made, late=LateObserver()):
        yield made


def test_shapes_are_recorded_and_pytorch_computes(path: Path, standins: Standins) -> None:
    query = torch.randn(2, 4, 24, 16, requires_grad=True)
    for _ in range(3):
        out, *_ = aten._scaled_dot_product_flash_attention(query, query, query, 0.0, True)
        assert out.eq(7).all()
    out.sum().backward()
    packed, begins = torch.randn(24, 4, 16), torch.tensor([0, 10, 24], dtype=torch.int32)
    varlen_attn(packed, packed, packed, begins, begins, 14, 14)
    assert set(standins.names) == {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_flash_attention_forward",
    }
    assert len(standins.calls) == 5
    assert [(shape.batch, shape.seqlen_q, shape.direction.value) for shape in written(path)] == [
        (2, 24, "forward"),
        (2, 24, "backward"),
        (2, 14, "forward"),
    ]


def test_an_error_costs_the_shape_alone(
    path: Path, standins: Standins, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observer, "call_of", lambda *_: 1 / 0)
    query = torch.randn(2, 4, 24, 16)
    for _ in range(2):
        assert aten._scaled_dot_product_flash_attention(query, query, query)[0].eq(7).all()
    assert [message for message in caplog.messages if "not recorded" in message] == [
        "A shape is not recorded: ZeroDivisionError: division by zero"
    ]
    assert not path.exists()


def test_the_dispatcher_records_its_shapes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_h200(monkeypatch)
    for length in (16, 32, 16):
        Dispatcher(ListSource())(*tensors(shape_like(length)))
    assert [shape.seqlen_q for shape in written(path)] == [16, 32]


@pytest.mark.parametrize(("recorded", "served", "observed"), [("", "", 0), ("x.toml", "", 1), ("x.toml", "1", 0)])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, recorded: str, served: str, observed: int) -> None:
    """Where our kernels serve PyTorch's attention, the dispatcher records."""
    monkeypatch.setattr(autoload, "_observed", [])
    monkeypatch.setattr(autoload, "_activate", lambda: None)
    monkeypatch.setenv("BLOCKTUNE_RECORD", recorded)
    monkeypatch.setenv("BLOCKTUNE_SDPA", served)
    monkeypatch.setenv("BLOCKTUNE_AUTOTUNE", "")
    autoload.install_by_environment()
    assert len(autoload._observed) == observed
    for handle in autoload._observed:
        handle.remove()
