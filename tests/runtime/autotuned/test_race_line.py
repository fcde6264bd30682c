"""The line on how a race ended."""

from dataclasses import replace

import triton

from blocktune.runtime.autotuned.config import launch_config
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.race_line import race_line
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung

BLOCKS = [launch_config("lib:scale", triton.Config({"BLOCK": block}, num_warps=4)) for block in (128, 256)]
RACED: KernelExplanation = Explanation(
    rung=Rung.EXACT,
    reason="measured",
    config=BLOCKS[1],
    time_us=50.0,
    default_time_us=75.0,
    tuned=True,
    seconds=1.26,
    times_us={BLOCKS[0]: 75.0, BLOCKS[1]: 50.0},
    dropped={"a": "infeasible: spills\n 300 B", "b": "infeasible: no block fits", "c": "run_error: it died"},
    spread=0.0123,
    spill_bytes=16,
)


def test_all_that_is_known_stands_in_one_line() -> None:
    assert race_line("n=1000", RACED) == (
        "scale BLOCK=256 num_stages=3 num_warps=4 for n=1000, 50.0 us +- 1.2 %, "
        "1.50 times as fast as the first config; spills 16 B a thread; 2 raced in 1.3 s; "
        "3 dropped: 2 infeasible (a: spills 300 B), 1 run_error (c: it died)"
    )


def test_what_is_not_known_is_left_out() -> None:
    bare = replace(RACED, time_us=None, spread=None, spill_bytes=None, dropped=None, times_us=None)
    assert race_line("n=1000", bare).endswith("for n=1000; 0 raced in 1.3 s; 0 dropped")
    assert "; no spills; " in race_line("n=1000", replace(RACED, spill_bytes=0))
