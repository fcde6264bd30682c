"""Which rung answers the shapes of a report."""

from dataclasses import replace
from pathlib import Path

from blocktune.cli.report.shape_views import rungs
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.sources import JsonConfigs, SqliteConfigs

UNTUNED = AttentionShape(batch=3, num_heads=9, seqlen_q=5000, seqlen_k=5000, head_dim=64)


def test_an_untuned_shape_has_the_rung_that_a_call_of_it_has(tmp_path: Path) -> None:
    """With the shipped results the shipped correction decides; a store alone knows nothing of untuned shapes."""
    own = SqliteConfigs(tmp_path / "absent.db")
    shapes, h200 = [UNTUNED, replace(UNTUNED, batch=5)], device_named("h200")
    assert set(rungs(h200, shapes, (own, JsonConfigs())).values()) == {"expected"}
    assert set(rungs(h200, shapes, (own,)).values()) == {"default"}
    assert "expected" not in rungs(device_named("a100"), shapes, (own, JsonConfigs())).values()
