"""CSV as Nsight Compute prints it, in both of its layouts, with values that a test gives."""

import csv
import io
from collections.abc import Mapping, Sequence

LAUNCH = {
    "Process ID": "4242", "Process Name": "python3.11", "Host Name": "127.0.0.1", "Kernel Name": "", "Context": "1",
    "Stream": "7", "Block Size": "(128, 1, 1)", "Grid Size": "(2048, 1, 1)", "Device": "0", "CC": "9.0",
}  # fmt: skip
"""What is known of a launch, in the order of the columns."""

Metrics = Mapping[str, tuple[str, str]]
"""A unit and a value by metric, as printed."""

HEAD = "==PROF== Connected to process 4242\nwhatever the program says\n==PROF== Disconnected\n"


def raw_page(launches: Sequence[tuple[str, Metrics]], head: str = HEAD) -> str:
    """What `--csv --page raw` prints: a column for every metric, the units in the line under the names."""
    names = list(launches[0][1])
    first = ["ID", *LAUNCH]
    rows = [[*first, *names], ["" for _ in first] + [launches[0][1][name][0] for name in names]]
    for number, (kernel, metrics) in enumerate(launches):
        about = LAUNCH | {"Kernel Name": kernel}
        rows.append([str(number), *about.values(), *(metrics[name][1] for name in names)])
    return head + _text(rows)


def details_page(launches: Sequence[tuple[str, Metrics]], head: str = HEAD) -> str:
    """What `--csv` alone prints: a line for every metric."""
    rows = [["ID", *LAUNCH, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]]
    for number, (kernel, metrics) in enumerate(launches):
        about = LAUNCH | {"Kernel Name": kernel}
        for name, (unit, value) in metrics.items():
            rows.append([str(number), *about.values(), "Command line profiler metrics", name, unit, value])
    return head + _text(rows)


def _text(rows: Sequence[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return out.getvalue()
