"""`tune kernels` and `tune occupancy MODULE:KERNEL`: the tools know kernels of other people."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Best, Environment, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import Origin
from blocktune.runtime.autotuned.config import CONFIGS, TYPES, KernelProblem, LaunchConfig, LaunchProblem
from blocktune.runtime.autotuned.frozen import forget_frozen, frozen_winners, load_frozen
from blocktune.runtime.autotuned.launches import Kind, Launches, append_launches
from tests.support.triton_modes import compiled_here

H200, SOURCE, KERNEL = device_named("h200"), "0123456789abcdef", "my.kernels:scale"
FAST, SLOW = (LaunchConfig(KERNEL, (("BLOCK", block), ("num_warps", 4))) for block in (256, 128))
PROBLEM = LaunchProblem.of({"n": 1000, TYPES: "bf16"})
ENVIRONMENT = Environment(triton="3.6.0", ptxas="12.8.93", torch="2.11.0")


@pytest.fixture
def filled(tune: Any) -> Any:
    facts: dict[str, Any] = {"device": H200, "environment": ENVIRONMENT, "kernel_hash": SOURCE}
    best = Best(
        **facts,
        shape=KernelProblem(KERNEL, LaunchProblem.of(dict(PROBLEM.arguments) | {CONFIGS: "abc"})),
        origin=Origin.MEASURED,
        config=FAST,
        time_us=50.0,
        default=SLOW,
        default_time_us=60.0,
        speedup_over_default=1.2,
        trials=2,
    )
    problem = KernelProblem(KERNEL, PROBLEM)
    trials = [
        Trial(**facts, shape=problem, config=SLOW, outcome=Outcome.INFEASIBLE, error="a thread spills 999 bytes"),
        Trial(**facts, shape=problem, config=FAST, outcome=Outcome.OK, time_us=50.0, samples_us=(50.0,)),
    ]
    with ResultStore.open(tune.db) as store:
        store.put_all(trials, [best])
    return tune


def test_winners_are_listed_and_trials_of_one(filled: Any) -> None:
    table = " ".join(filled("kernels", "--device", "h200").output.split())
    assert "my.kernels:scale n=1000 (bf16) scale BLOCK=256 num_warps=4 50.0 µs 1.200x 2 0 0 0.0" in table
    found = json.loads(filled("kernels", "--device", "h200", "--json").stdout)
    assert [kernel["best"]["config"]["parameters"] for kernel in found["kernels"]] == [{"BLOCK": 256, "num_warps": 4}]
    trials = filled("kernels", "my.*", "--device", "h200").output
    assert trials.index("BLOCK=256") < trials.index("BLOCK=128")
    assert "a thread spills 999 bytes" in trials
    none = filled("kernels", "others:*", "--device", "h200")
    assert (none.exit_code, none.stdout) == (6, "")
    assert none.stderr.startswith("error: No kernel others:* was tuned on NVIDIA H200.")


def test_what_processes_launched_is_told_beside_the_winners(
    filled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTUNE_LAUNCHES", str(tmp_path / "launches.jsonl"))
    for launches in (Launches(hits=1200, misses=1, seconds=2.5), Launches(hits=34)):
        append_launches(tmp_path / "launches.jsonl", {Kind(H200.key, KERNEL, PROBLEM): launches})
    table = " ".join(filled("kernels", "--device", "h200").output.split())
    assert "50.0 µs 1.200x 2 1,234 1 2.5" in table
    (kernel,) = json.loads(filled("kernels", "--device", "h200", "--json").stdout)["kernels"]
    assert kernel["launches"] == {"hits": 1234, "misses": 1, "seconds": 2.5}


def test_winners_are_frozen_and_taken_again(filled: Any, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    for path in paths:
        assert filled("kernels", "--device", "h200", "--freeze", path).exit_code == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert load_frozen(paths[0]) == 1
    (winner,) = frozen_winners(KERNEL, SOURCE, H200)
    assert (winner.config, winner.time_us) == (FAST, 50.0)
    assert frozen_winners(KERNEL, SOURCE, device_named("a100_sxm4_80")) == []
    forget_frozen()


def test_without_a_database_there_is_nothing_to_list_or_freeze(tune: Any, tmp_path: Path) -> None:
    assert "no database" in tune("kernels", "--device", "h200").output
    assert tune("kernels", "--device", "h200", "--freeze", tmp_path / "x.json").exit_code == 6


@compiled_here
def test_a_kernel_is_compiled_and_explained_by_its_name(tune: Any) -> None:
    name = "tests.support.libraries.autotuned_kernels:scale_kernel"
    done = tune("occupancy", name, "--signature", "*fp32,i32:16,fp32", "--param", "BLOCK=512", "--cc", "9.0")
    assert done.exit_code == 0, done.output
    assert "scale_kernel BLOCK=512" in done.output
    assert "blocks/SM on compute capability 9.0" in done.output


@compiled_here
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.module:f"], "no.module:f cannot be imported: No module named 'no'"),
        (["../..:f"], "a name that begins with a dot is relative"),
        (["../.."], "a name that begins with a dot is relative"),
        (["json:dumps"], "dumps is not a function of `triton.jit`"),
        (["tests.support.libraries.autotuned_kernels:scale_kernel"], "has a type for each of x, n, factor, but ''"),
        (
            ["tests.support.libraries.autotuned_kernels:scale_kernel", "--signature", "*fp32,i32,fp32", "--warps", "4"],
            "BLOCK has neither",
        ),
        (
            [
                "tests.support.libraries.autotuned_kernels:scale_kernel",
                "--signature",
                "*fp32,i32,fp32",
                "--param",
                "BLOCK",
            ],
            "must be NAME=VALUE",
        ),
        (
            [
                "tests.support.libraries.autotuned_kernels:scale_kernel",
                "--signature",
                "*fp32,i32,fp32",
                "--param",
                "BLOCK=100",
            ],
            "must compile for compute capability 9.0, but does not",
        ),
    ],
)
def test_what_cannot_be_compiled_says_why(tune: Any, words: list[str], message: str) -> None:
    done = tune("occupancy", *words, "--cc", "9.0")
    assert done.exit_code in (2, 3, 6)
    assert message in " ".join(done.output.split())
