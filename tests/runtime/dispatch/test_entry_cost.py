"""What a call of every entry point costs on the host, of tensors so small that the GPU waits; on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.attention.entry_calls import entry_calls
from tests.support.attention.host_time import HostTime, calmest
from tests.support.recording import HOST_COST

pytestmark = pytest.mark.gpu

CALLS = 2000
P99_RATIO = 3.0
"""Of a 99th percentile to its median; beyond it something else than the call takes part."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a call may cost: in microseconds, and times what PyTorch's attention does."""

    us: float = float("inf")
    ratio: float = float("inf")


BARS = {
    "forward": Bar(ratio=1.0),
    "forward with gradients": Bar(ratio=1.3),
    "backward": Bar(ratio=1.0),
    "boolean mask": Bar(25, 1.0),
    "dropout": Bar(ratio=1.0),
    "flash_attn_func": Bar(25),
    "window": Bar(25),
    "soft cap": Bar(25),
    "packed sequences": Bar(35),
    "cache": Bar(25),
    "cache, with new keys": Bar(45),
    "compiled graph": Bar(ratio=1.1),
    "compiled graph, forward and backward": Bar(ratio=1.1),
}
"""Calls without one must keep the ratio of their percentiles alone."""


@pytest.mark.parametrize("entry", entry_calls("cuda"))
def test_host_cost_of_an_entry_point(
    entry: str, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    ours, pytorchs = entry_calls("cuda")[entry]()
    calls = {"ours": ours} if pytorchs is None else {"ours": ours, "sdpa": pytorchs}
    for call in calls.values():
        for _ in range(3):  # resolve, record, repeat
            call()
    times = calmest(calls, CALLS)
    record_property(HOST_COST, {"entry": entry, "times": {what: one.document for what, one in times.items()}})
    with capsys.disabled():
        print(f"\n{entry}: " + "; ".join(f"{what} {one}" for what, one in times.items()))
    problems = list(missed(BARS.get(entry, Bar()), times))
    assert not problems, problems


def missed(bar: Bar, times: dict[str, HostTime]) -> list[str]:
    """The bars that a call does not keep."""
    ours, pytorchs = times["ours"], times.get("sdpa")
    problems = []
    if ours.median_us > bar.us:
        problems.append(f"{ours.median_us:.1f} us, at most {bar.us} us wanted")
    if pytorchs is not None and ours.median_us > bar.ratio * pytorchs.median_us:
        problems.append(f"{ours.median_us / pytorchs.median_us:.2f} times PyTorch's, at most {bar.ratio} wanted")
    if ours.p99_us > P99_RATIO * ours.median_us:
        problems.append(f"a 99th percentile of {ours.p99_us:.1f} us, at most {P99_RATIO} medians wanted")
    return problems
