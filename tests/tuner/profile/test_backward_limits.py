"""The program that profiles backwards finds whose launches are whose, and says what warps wait for."""

import csv
import io
import json

from blocktune.tuner.profile.counters import STALLED, TIME
from tools.bench.backward_limits import METRICS, cells, read_profile

WAITS = {"selected": 1.0, "gmma": 3.0, "long_scoreboard": 1.0}
STALLS = {f"{STALLED[0]}{reason}{STALLED[1]}": warps for reason, warps in WAITS.items()}


def printed(*kernels: tuple[str, float]) -> str:
    """Return what ncu prints of kernels that took some microseconds, every unit busy for a tenth of the time."""
    lines = io.StringIO()
    names = ("ID", "Kernel Name", *METRICS, *STALLS)
    table = csv.writer(lines, quoting=csv.QUOTE_ALL)
    table.writerow(names)
    table.writerow(["", "", *("us" if name == TIME else "%" for name in METRICS), *("" for _ in STALLS)])
    for number, (kernel, time_us) in enumerate(kernels):
        values = (time_us if name == TIME else 10.0 for name in METRICS)
        table.writerow([number, kernel, *values, *STALLS.values()])
    return lines.getvalue()


def test_launches_belong_to_the_one_named_before_them() -> None:
    names = "\n".join(json.dumps(["s1", whose]) for whose in ("ours", "theirs"))
    marks = ("erfinv_kernel", 1.0)
    text = f"{names}\n==PROF== Disconnected\n{printed(marks, ('a', 30.0), ('b', 90.0), marks, ('c', 100.0))}"
    (ours, launches), (theirs, alone) = read_profile(text)
    assert (ours, theirs) == (["s1", "ours"], ["s1", "theirs"])
    assert ([launch.kernel for launch in launches], [launch.kernel for launch in alone]) == (["a", "b"], ["c"])


def test_a_row_is_of_the_longest_kernel_and_names_waits_without_warps_that_issue() -> None:
    text = f'["s1", "ours"]\n{printed(("erfinv_kernel", 1.0), ("a", 30.0), ("b", 90.0))}'
    ((names, launches),) = read_profile(text)
    assert cells(names, launches) == [
        "s1", "ours", "90", "10 %", "10 %", "20 %", "10 %", "10 %", "gmma 75 %, long scoreboard 25 %",
    ]  # fmt: skip
