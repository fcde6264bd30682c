"""The program that runs Triton's own tests of its autotuner in three ways."""

from pathlib import Path

import pytest

from tests.support.triton_modes import compiled_here
from tools.checks.triton_tests import FileRecord, record_of

pytestmark = compiled_here

CASES = """
import pytest
import triton

configs = [triton.Config({}), triton.Config({}, num_warps=8)]

@triton.jit
def kernel(x): pass

def test_both(device): triton.autotune(configs, [])(kernel)

def test_stock(device):
    assert type(triton.autotune(configs, [])(kernel)) is triton.runtime.Autotuner

@pytest.mark.skip
def test_none(): pass
"""


def test_a_record_says_where_a_way_differs() -> None:
    ended = {
        "stock": {"a": "passed", "b": "passed", "c": "failed"},
        "install": {"a": "passed", "b": "failed", "c": "passed"},
    }
    record = FileRecord.of(Path("v1/test_x.py"), ended)
    assert record.file == "v1/test_x.py"
    assert record.counts == {"stock": {"passed": 2, "failed": 1}, "install": {"passed": 2, "failed": 1}}
    assert (record.worse, record.better) == ({"install": ["b"]}, {"install": ["c"]})


@pytest.mark.slow
def test_tests_run_in_three_ways(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    record = record_of(tmp_path / "test_cases.py", stands_in=True)
    assert record.counts["stock"] == record.counts["install"] == {"passed": 2, "skipped": 1}
    assert record.worse == {"install": [], "autotune": ["test_stock"]}
