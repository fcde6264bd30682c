"""First steps of packages: rows of what processes tell, and processes that do not tell all."""

from pathlib import Path

from tools.libraries.first_steps import COLUMNS, STARTS, TUNERS, _imports, functions_of, rows_of
from tools.libraries.package_process import paths_of, run_program
from tools.libraries.public_calls import adasplash_entmax

KEYS = [(tuner, start) for start in STARTS for tuner in TUNERS]


def answer(first_s: float) -> dict[str, object]:
    return {"function": "adasplash_entmax", "first_s": first_s, "kernels": 2, "gpu_us": 10.0 * first_s}


def test_a_row_has_both_tuners_and_a_failure_its_error() -> None:
    failed = [{"function": "adasplash_attention", "error": "OSError: gone"}]
    told = {key: [*failed, answer(seconds)] for key, seconds in zip(KEYS, (9.0, 3.0, 0.5, 0.4), strict=True)}
    broken, row = rows_of("adasplash", told)
    assert row[:2] == ["adasplash", "adasplash_entmax"]
    assert row[2:] == ["2", "9.00 s", "3.00 s", "3.0", "0.50 s", "0.40 s", "5.0 µs", "4.0 µs", "1.250"]
    assert broken[:3] == ["adasplash", "adasplash_attention", "OSError: gone"]
    assert len(row) == len(broken) == len(COLUMNS)


def test_imports_of_a_function_come_before_its_time() -> None:
    assert list(_imports(adasplash_entmax)) == ["adasplash"]
    assert [function.__name__ for function in functions_of("fla-core")[-2:]] == ["fla_delta_rule_long", "fla_gla_long"]


def test_a_process_that_fails_or_lasts_tells_why(tmp_path: Path) -> None:
    paths = paths_of(tmp_path, ["adasplash"])
    assert paths == [tmp_path / "adasplash", tmp_path / "deps"]
    words = ("first_steps", str(tmp_path), "adasplash")
    lines, problem = run_program(words, paths, tmp_path / "caches", 60.0)
    assert (lines, "--out is missing" in problem) == ([], True)
    assert run_program(words, paths, tmp_path / "caches", 0.0)[1] == "it took longer than 0 s"
