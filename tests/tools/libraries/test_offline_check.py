"""The check of offline tables: what Triton launches is among what they tell, and records keep other packages' rows."""

from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.dry_run.explain import CompileTarget, tables_of
from blocktune.tuner.dry_run.recorder import dry_launches
from tests.support.libraries import launched_kernels
from tests.support.triton_modes import compiled_here
from tools.libraries.offline_check import COLUMNS, PackageRecord, document, launched_by_triton, told

H200 = device_named("h200")


@compiled_here
def test_what_triton_launches_is_told_with_what_it_takes() -> None:
    launches = dry_launches(launched_kernels.strided, H200)
    ours = told(launches, tables_of(launches, CompileTarget(H200.limits, H200), H200))
    theirs = launched_by_triton(launched_kernels.strided, H200)
    assert len(theirs) == 2
    assert {key: ours[key] for key in theirs} == theirs


def test_rows_of_packages_that_are_not_checked_again_stay() -> None:
    record = PackageRecord("lib", "NVIDIA H200", 1, {"lib:kernel": True, "lib:other": False}, configs=9)
    row = ["lib", "NVIDIA H200", "1", "2", "1", "9", "0", "0", "0"]
    assert document([record], {}, [])["rows"] == [row]
    other = ["other", *row[1:]]
    made = document([record], {"lib": "1.0"}, [["lib", "NVIDIA H200", *"0000000"], other])
    assert made["rows"] == [other, row]
    assert "2 of 4 exact" in made["how"]
    assert (len(made["columns"]), made["environment"]["lib"]) == (len(COLUMNS), "1.0")
