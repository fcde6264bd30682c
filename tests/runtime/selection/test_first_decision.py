"""The work of a process's first decision, by counts that do not depend on the machine or on other programs."""

import json
import subprocess
import sys
from typing import Any

import pytest

MODULES, OBJECTS, RATIOS = 45, 20_000, 1_500
"""Modules that are imported, objects that the garbage collector has to walk, and measured configs that are decoded. It
collects all objects of a process, for 0.1 s, when there are 70,000 more: a first decision once made most of those."""

PROGRAM = """
import gc, json, sys
from blocktune import AttentionShape, attention, best_config
from blocktune.runtime.selection import correction

decoded = 0
ratio = correction.LogRatio

def counted(*values):
    global decoded
    decoded += 1
    return ratio(*values)

correction.LogRatio = counted
shape = AttentionShape(
    batch=2, num_heads=16, num_heads_kv=16, seqlen_q=1024, seqlen_k=1024, head_dim=64, dtype="bfloat16",
    causal="upper_left", direction=sys.argv[1],
)
gc.disable()
modules, objects = set(sys.modules), len(gc.get_objects())
found = best_config(shape, device="h200")
json.dump(
    {
        "reason": found.reason,
        "modules": len(set(sys.modules) - modules),
        "objects": len(gc.get_objects()) - objects,
        "ratios": decoded,
    },
    sys.stdout,
)
"""


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_first_decision_reads_little_of_what_was_measured(direction: str) -> None:
    command = [sys.executable, "-c", PROGRAM, direction]
    told: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "expected to take" in told["reason"]
    assert told["modules"] <= MODULES
    assert told["objects"] <= OBJECTS
    assert 0 < told["ratios"] <= RATIOS
