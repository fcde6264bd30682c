"""What a store knows of a kernel, and in which order it serves a call."""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import StoreCorruptError, UsageError
from blocktune.runtime.autotuned.config import CONFIGS, TYPES, LaunchConfig, LaunchProblem, Plain
from blocktune.runtime.autotuned.fallback import KernelWinner, kernel_offers, stored_winners
from blocktune.runtime.selection.ladder import Candidate, Rejection, Rung, climb
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from tests.support.suite import warm_python

H200 = device_named("h200")
KERNEL, SOURCE = "package.module:softmax", "0123456789abcdef"


def problem(**keys: Plain) -> LaunchProblem:
    return LaunchProblem.of({"n": 128, TYPES: "bf16 /16", CONFIGS: "abc"} | keys)


def winner(block: int, *, reuse: Reuse = Reuse.EXACT, **keys: Plain) -> KernelWinner:
    config = LaunchConfig(KERNEL, (("BLOCK", block),))
    origin = Origin.MEASURED if reuse is Reuse.EXACT else Origin.BORROWED
    return TunedConfig(shape=problem(**keys), config=config, origin=origin, time_us=1.5 * block, reuse=reuse)


def order_of(
    given: list[KernelWinner], stored: list[KernelWinner], last: Rung = Rung.NEAREST
) -> list[tuple[str, Any, int]]:
    """The rung, what the measurement is worth, and the block of each candidate."""
    steps = climb(kernel_offers(given, lambda: stored, problem()), last=last, refusal="no further")
    return [
        (str(step.rung), step.reuse, step.config.parameters["BLOCK"]) for step in steps if isinstance(step, Candidate)
    ]


def test_the_order_of_candidates() -> None:
    stored = [
        winner(16, n=256, reuse=Reuse.SAME_CAPABILITY),
        winner(32, reuse=Reuse.OTHER_COMPILER),
        winner(64, n=256),
        winner(16),
        winner(16, n=128 << 7),  # too far
        winner(16, **{TYPES: "fp32 /16"}),  # another code
        winner(16, **{CONFIGS: "abd"}),  # chosen from another list
        winner(16, m=128),
        winner(16, n="128"),
    ]
    assert order_of([], stored) == [
        ("exact", Reuse.EXACT, 16),
        ("other_compiler", Reuse.OTHER_COMPILER, 32),
        ("nearest", Reuse.EXACT, 64),
        ("nearest", Reuse.SAME_CAPABILITY, 16),
    ]


def test_what_was_given_precedes_the_store_which_is_read_where_it_is_needed() -> None:
    def unread() -> list[KernelWinner]:
        raise AssertionError("the store was read")

    given, other = winner(32), winner(64, n=256)
    assert order_of([given], [winner(16)])[0] == ("frozen", Reuse.EXACT, 32)
    assert order_of([other], [winner(16)]) == [("exact", Reuse.EXACT, 16), ("nearest", Reuse.EXACT, 64)]
    first = next(climb(kernel_offers([given], unread, problem())))
    assert isinstance(first, Candidate)


def test_the_climb_ends_at_the_last_rung_that_is_accepted_and_says_so() -> None:
    stored = [winner(32, reuse=Reuse.OTHER_COMPILER), winner(64, n=256)]
    assert order_of([], stored, last=Rung.OTHER_DRIVER) == []
    assert order_of([], stored, last=Rung.OTHER_COMPILER) == [("other_compiler", Reuse.OTHER_COMPILER, 32)]
    steps = list(climb(kernel_offers([], lambda: stored, problem()), last=Rung.EXACT, refusal="no further"))
    assert steps[0] == Rejection(
        Rung.EXACT, "nothing was measured for this call on this device with this triton, ptxas and driver"
    )
    assert steps[1:] == [Rejection(Rung.OTHER_DRIVER, "no further")]


def test_problems_survive_their_document() -> None:
    made = LaunchProblem.of(
        {"n": 3, "causal": True, "scale": 0.5, "bias": None, "name": "a", TYPES: "bf16", CONFIGS: "abc"}
    )
    assert LaunchProblem.from_document(made.document) == made
    assert made.label == "bias=None causal=True n=3 name=a scale=0.5 (bf16)"
    assert (
        LaunchProblem.from_document('{"x":{"dtype":"float32","shape":[4,3],"strides":[3,1]}}').label
        == "x=float32[4, 3]"
    )


@pytest.mark.parametrize("text", ["[]", "1", "{", '{"x": {"dtype": "float32"}}', '{"x": [1]}', "[" * 10_000])
def test_a_document_that_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="problem of a tuned kernel is not valid"):
        LaunchProblem.from_document(text)


def test_configs_hold_plain_values_alone() -> None:
    config = LaunchConfig(KERNEL, (("num_warps", 4), ("EVEN", True), ("MODE", "tf32"), ("BIAS", None)))
    assert LaunchConfig.from_document(KERNEL, config.document) == config
    assert config.label == "softmax BIAS=None EVEN=True MODE=tf32 num_warps=4"
    for name, value in (("BLOCK", 1 << 63), ("BLOCK", float("inf")), ("BLOCK", [1]), ("2x", 1)):
        with pytest.raises(UsageError, match="A parameter must be"):
            LaunchConfig(KERNEL, ((name, value),))  # type: ignore[arg-type]


def test_a_missing_store_is_no_problem(tmp_path: Path) -> None:
    assert stored_winners(KERNEL, SOURCE, H200, tmp_path / "none.db") == []


@pytest.mark.parametrize(
    "place",
    ["~nobody-of-this-name/x.db", "x" * 300 + ".db", "postgresql://me@host/db", "/dev/null/x.db", "results.json", "/"],
)
def test_no_place_of_a_store_raises_into_a_call(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", place)
    assert stored_winners(KERNEL, SOURCE, H200) == []


def test_a_user_without_a_home_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert stored_winners(KERNEL, SOURCE, H200) == []


@pytest.mark.parametrize("version", ["\u00b2", "9" * 5000, "", "-1", "0x4"])
def test_a_version_that_is_no_number_is_no_reason_to_raise(tmp_path: Path, version: str) -> None:
    path = tmp_path / "store.db"
    ResultStore.open(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE blocktune_schema SET version_num = ?", (version,))
    assert stored_winners(KERNEL, SOURCE, H200, path) == []
    with pytest.raises(StoreCorruptError, match="one revision number"):
        ResultStore.open(path)


def test_a_store_in_a_directory_that_may_not_be_searched_is_no_problem(open_directory: Path) -> None:
    path = open_directory / "closed" / "store.db"
    path.parent.mkdir()
    ResultStore.open(path).close()
    path.parent.chmod(0o600)
    code = (
        "import os, sys; from pathlib import Path; from blocktune.runtime.autotuned.fallback import stored_winners\n"
        "from blocktune.kernels.hardware.device import device_named\n"
        "device = device_named('h200')\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(stored_winners('m:f', 'a' * 16, device, Path(sys.argv[1])))"
    )
    command = [sys.executable, "-P", "-c", code, str(path)]
    assert warm_python.run(command, check=True, cwd="/").stdout == "[]\n"
    path.parent.chmod(0o700)
