"""Tables of configs: exact, ranked by resources, with what is of no use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blocktune import offline
from blocktune.kernels.values.errors import UsageError
from tests.support.libraries import autotuned_kernels, launched_kernels
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here

NAME = "tests.support.libraries.launched_kernels"


def test_a_table_has_every_config_with_its_flaws() -> None:
    (even, odd) = offline.explain(launched_kernels.even, device="h200").tables
    assert [row.same_as for row in even.rows] == [None, 1, None, 3]  # stages change nothing without a loop
    assert [row.number for row, flaw, _ in odd.flawed((offline.Flaw.DUPLICATES,))] == [2, 4]
    assert even.ranked[0].fit is not None
    assert even.ranked[0].fit.fraction == 1.0
    assert even.rows[0].costs is not None
    assert even.rows[0].costs.bytes == 2 * 4 * 1024
    assert even.mix is not None
    assert even.mix.total["global memory"] >= 2


@pytest.mark.exhaustive
def test_what_does_not_fit_is_ranked_last_and_the_document_is_json() -> None:
    report = offline.explain(f"{NAME}:product", device="h200")
    (table,) = report.tables
    assert [sorted(row.flaws) for row in table.rows] == [["spills"], ["unfit"]]
    assert table.ranked[-1].number == 2
    (document,) = json.loads(json.dumps(report.to_json()))["tables"]
    assert (document["device"], document["listed"]) == ("NVIDIA H200", 2)
    assert "shared memory" in document["configs"][1]["error"]
    assert "Of 2 configs, 1 cannot run, 1 spill." in str(report)
    assert str(report).endswith("It is no time.")
    assert report._repr_html_().count("<tr>") == 3


@pytest.mark.exhaustive
def test_another_device_has_another_table() -> None:
    (table,) = offline.explain(launched_kernels.product, device="a100").tables
    assert table.limits.name == "8.0"
    assert table.rows[0].resources is not None
    assert table.rows[0].resources.tensor_cores == "mma"


@pytest.mark.exhaustive
def test_a_table_of_types_is_that_of_the_launch() -> None:
    launched, _ = offline.explain(launched_kernels.even, device="h200").tables
    table = offline.table(launched_kernels.even_kernel, "*fp32, *fp32, i32=1024", device="h200")
    ours = [row.resources and row.resources.code_sha256 for row in table.rows]
    assert ours == [row.resources and row.resources.code_sha256 for row in launched.rows]
    with pytest.raises(UsageError, match="has no list of configs"):
        offline.table(autotuned_kernels.row_kernel, "*fp32, *fp32, i32", device="h200")


def test_a_function_must_launch_something() -> None:
    with pytest.raises(UsageError, match="launches none on NVIDIA H200"):
        offline.explain(launched_kernels.launches_nothing, device="h200")


LIBRARY = """
import os, sys, torch, triton
from tests.support.libraries.launched_kernels import even_kernel
KERNEL = even_kernel if torch.cuda.is_available() else None
def step():
    print("printed")
    x = torch.zeros(1024, device="cuda")
    KERNEL[lambda meta: (triton.cdiv(1024, meta["BLOCK"]),)](x, x, 1024)
def ends():
    os._exit(0)
def leaves():
    step()
    sys.exit(3)
"""


@pytest.mark.exhaustive
def test_a_library_that_looks_for_a_gpu_at_its_import_is_not_imported_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library_for_gpus.py").write_text(LIBRARY)
    script = """
import sys
from blocktune import offline
print(len(offline.explain("library_for_gpus:step", device="h200").tables[0].rows), "library_for_gpus" in sys.modules)
"""  # without `if __name__ == "__main__"`, as scripts are
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "False"]
    assert "printed" in done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    for name, message in (
        ("library_for_gpus:ends", "must not end its process, but did so on NVIDIA H200"),
        ("library_for_gpus:leaves", r"called sys.exit\(3\) after 1 kind of launches"),
        (f"{NAME}:launches_nothing", f"{NAME}:launches_nothing launches none on NVIDIA H200"),
        (f"{NAME}:nothing", "has no attribute 'nothing'"),
    ):
        with pytest.raises(UsageError, match=message):
            offline.explain(name, device="h200")
