"""`@tuned`: choices, constraints, the ladder of a call, and what is refused."""

import logging
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.stored.provenance import Reuse
from blocktune.kernels.tuned import function as user_kernel
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.tuned.fallback import UserRung, UserWinner, candidates, stored_winners
from blocktune.kernels.tuned.function import TunedFunction, tuned
from blocktune.kernels.values.errors import StoreCorruptError, UsageError
from tests.support import user_functions

CALLS: list[int] = []


def added(x: torch.Tensor, y: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
    return scale * (x if y is None else x + y)


@tuned(
    parameters={"block": (16, 32, 64)},
    constraints={"block <= length": lambda config, x, **_: config["block"] <= x.shape[0]},
    reference=added,
    default={"block": 32},
)
def add(x: torch.Tensor, y: torch.Tensor | None = None, *, scale: float = 1.0, block: int) -> torch.Tensor:
    """Adds."""
    CALLS.append(block)
    if block == 64 and scale < 0:
        raise RuntimeError("no such instruction")
    return added(x, y, scale=scale)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    add._winners.clear()
    add.reload()
    CALLS.clear()


def config(block: int) -> UserConfig:
    return UserConfig(add.name, (("block", block),))


def winner(block: int, *args: Any, reuse: Reuse = Reuse.EXACT, **kwargs: Any) -> UserWinner:
    return UserWinner(
        problem=Problem.of(add.bound(args, kwargs)), config=config(block), time_us=1.5 * block, reuse=reuse
    )


def know(monkeypatch: pytest.MonkeyPatch, *known: UserWinner) -> None:
    """Makes the function know these winners, as if its tensors were on a GPU."""
    monkeypatch.setattr(TunedFunction, "_winners_on", lambda self, device: list(known))


def test_it_still_looks_like_the_function() -> None:
    assert (add.__name__, add.__doc__, add.name) == ("add", "Adds.", f"{__name__}:add")
    x = torch.arange(64.0)
    torch.testing.assert_close(add(x, x, scale=0.5), x)


def test_the_default_serves_until_something_is_known() -> None:
    explanation = add.explain(torch.ones(40))
    assert (explanation.rung, explanation.config) == (UserRung.DEFAULT, config(32))
    add(torch.ones(40))
    assert CALLS == [32, 32]


def test_a_default_that_cannot_run_leaves_its_place_to_the_first_config_that_can() -> None:
    assert add.explain(torch.ones(20)).config == config(16)


def test_what_no_config_can_run_is_computed_by_the_reference() -> None:
    explanation = add.explain(torch.ones(4))
    assert (explanation.rung, explanation.config) == (UserRung.REFERENCE, None)
    assert torch.equal(add(torch.ones(4), scale=3.0), torch.full((4,), 3.0))
    assert CALLS == []


def test_tensors_on_the_cpu_are_computed_by_the_reference_where_triton_runs_no_kernel() -> None:
    x = torch.randn(4, 100)
    assert torch.equal(user_functions.softmax(x), user_functions.softmax.reference(x))
    explanation = user_functions.softmax.explain(x)
    assert (explanation.rung, explanation.config) == (UserRung.REFERENCE, None)
    assert explanation.passed_over[-1].startswith("default: Triton runs no kernel without a GPU (")


def test_an_exact_winner_outranks_a_nearer_driver_and_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(100)
    know(
        monkeypatch,
        winner(16, torch.ones(101)),
        winner(32, x, reuse=Reuse.OTHER_DRIVER),
        winner(64, x),
    )
    explanation = add.explain(x)
    assert (explanation.rung, explanation.config, explanation.time_us) == (UserRung.EXACT, config(64), 96.0)
    add(x)
    assert CALLS == [64, 64]


def test_the_order_of_candidates() -> None:
    problem = winner(16, torch.ones(128)).problem
    stored = [
        winner(16, torch.ones(256), reuse=Reuse.SAME_CAPABILITY),
        winner(32, torch.ones(128), reuse=Reuse.OTHER_COMPILER),
        winner(64, torch.ones(256)),
        winner(16, torch.ones(128)),
        winner(16, torch.ones(128 << 7)),  # too far
        winner(16, torch.ones(128, dtype=torch.float64)),  # another code
        winner(16, torch.ones(128), torch.ones(128)),
        winner(16, torch.ones(128), scale=2.0),
    ]
    order = [(str(rung), found.reuse, found.config.parameters["block"]) for rung, found in candidates(stored, problem)]
    assert order == [
        ("exact", Reuse.EXACT, 16),
        ("other_compiler", Reuse.OTHER_COMPILER, 32),
        ("nearest", Reuse.EXACT, 64),
        ("nearest", Reuse.SAME_CAPABILITY, 16),
    ]


def test_a_neighbour_must_fulfil_the_constraints_of_this_call(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, winner(64, torch.ones(64)))
    explanation = add.explain(torch.ones(50))
    assert explanation.rung is UserRung.DEFAULT
    assert "`block <= length` must hold" in explanation.passed_over[0]


def test_a_config_that_is_no_choice_any_more_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    known = winner(64, torch.ones(90))
    strange = UserWinner(
        problem=known.problem, config=UserConfig(add.name, (("block", 48),)), time_us=1.0, reuse=Reuse.EXACT
    )
    know(monkeypatch, strange)
    assert "`block` must be one of (16, 32, 64)" in add.explain(torch.ones(90)).passed_over[0]


def test_a_winner_that_does_not_run_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(90)
    know(monkeypatch, winner(64, x, scale=-1.0))
    with caplog.at_level(logging.WARNING, "blocktune"):
        assert torch.equal(add(x, scale=-1.0), -x)
    assert "no such instruction" in caplog.text
    assert add.explain(x, scale=-1.0).rung is UserRung.DEFAULT


def test_an_error_of_the_default_is_the_callers() -> None:
    @tuned(parameters={"block": (16,)}, reference=added)
    def failing(x: torch.Tensor, *, block: int) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing(torch.ones(3))


def test_the_key_holds_all_that_matters() -> None:
    x = torch.ones(64, 64)
    kinds: Sequence[tuple[torch.Tensor, dict[str, Any]]] = [
        (x, {}),
        (x[:40], {}),
        (x.mT, {}),
        (x.double(), {}),
        (x, {"scale": 2.0}),
        (x, {"scale": 2}),
        (x, {"y": x}),
    ]
    for tensor, options in kinds:
        add(tensor, **options)
        add(tensor, **options)
    assert len(add._plans) == len(kinds)
    assert len({plan.explanation.problem.document for plan in add._plans.values()}) == len(kinds)


def test_the_source_hash_follows_function_and_jitted_callees() -> None:
    assert len(add.source_hash) == 16
    assert add.source_hash != tuned(parameters={"block": (16,)}, reference=added)(added_in_blocks).source_hash


def added_in_blocks(x: torch.Tensor, *, block: int) -> torch.Tensor:
    return x


def test_threads_share_it() -> None:
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(add(torch.ones(70)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(add._plans) == 1


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: tuned(parameters={"tile": (1,)}, reference=added)(added_in_blocks), "takes no tile"),
        (lambda: tuned(parameters={"block": ()}, reference=added)(added_in_blocks), "has 0"),
        (lambda: tuned(parameters={"block": (1.5,)}, reference=added)(added_in_blocks), "a name and an integer"),
        (
            lambda: tuned(parameters={"block": (1,)}, reference=added, default={"block": 2})(added_in_blocks),
            "default",
        ),
    ],
)
def test_a_wrong_decoration_is_refused(decorate: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decorate()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([1, 2],), {}, "`x` is a list"),
        ((), {}, "missing a required argument"),
        ((torch.ones(20),), {"scale": "x" * 2000}, "up to 1000 characters"),
    ],
)
def test_arguments_that_are_no_problem_are_refused(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        add(*args, **kwargs)


@pytest.mark.parametrize("text", ["[]", "1", "{", '{"x": {"dtype": "float32"}}', '{"x": [1]}', "[" * 10_000])
def test_a_document_that_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="Not a problem"):
        Problem.from_document(text)


def test_problems_survive_their_document() -> None:
    x = torch.ones(3, 4)
    problem = Problem.of({"x": x.mT, "causal": True, "scale": 0.5, "y": None, "name": "a"})
    assert Problem.from_document(problem.document) == problem
    assert problem.label == "causal=True name=a scale=0.5 x=float32[4, 3] strides [1, 4] y=None"


def test_a_missing_store_is_no_problem(tmp_path: Path) -> None:
    assert stored_winners(add.name, add.source_hash, device_named("h200"), tmp_path / "none.db") == []


@pytest.mark.parametrize(
    "place",
    ["~nobody-of-this-name/x.db", "x" * 300 + ".db", "postgresql://me@host/db", "/dev/null/x.db", "results.json", "/"],
)
def test_no_place_of_a_store_raises_into_a_call(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", place)
    assert stored_winners(add.name, add.source_hash, device_named("h200")) == []


def test_a_user_without_a_home_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert stored_winners(add.name, add.source_hash, device_named("h200")) == []


@pytest.mark.parametrize("version", ["\u00b2", "9" * 5000, "", "-1", "0x4"])
def test_a_version_that_is_no_number_is_no_reason_to_raise(tmp_path: Path, version: str) -> None:
    path = tmp_path / "store.db"
    ResultStore.open(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE blocktune_schema SET version_num = ?", (version,))
    assert stored_winners(add.name, add.source_hash, device_named("h200"), path) == []
    with pytest.raises(StoreCorruptError, match="one revision number"):
        ResultStore.open(path)


def test_a_device_that_cannot_be_asked_about_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def strange(index: int) -> None:
        raise OSError("no such driver")

    monkeypatch.setattr(user_kernel, "current_device", strange)
    assert add._winners_on(0) == []
    assert "no such driver" in caplog.text


def test_a_store_in_a_directory_that_may_not_be_searched_is_no_problem(open_directory: Path) -> None:
    path = open_directory / "closed" / "store.db"
    path.parent.mkdir()
    ResultStore.open(path).close()
    path.parent.chmod(0o600)
    code = (
        "import os, sys; from pathlib import Path; from blocktune.kernels.tuned.fallback import stored_winners\n"
        "from blocktune.kernels.hardware.device import device_named\n"
        "device = device_named('h200')\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(stored_winners('m:f', 'a' * 16, device, Path(sys.argv[1])))"
    )
    command = [sys.executable, "-P", "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout == "[]\n"
    path.parent.chmod(0o700)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """The CPU as GPU 0, an H200 whose winners are those of 64 once the returned function is called."""
    go = threading.Event()
    device = device_named("h200")

    def read(name: str, source_hash: str, device: DeviceSpec) -> list[UserWinner]:
        assert go.wait(60)
        return [winner(64, torch.ones(80))]

    monkeypatch.setattr(user_kernel, "current_device", lambda index: device)
    monkeypatch.setattr(user_kernel, "stored_winners", read)
    tensor = SimpleNamespace(device=SimpleNamespace(index=0), is_cuda=False)
    monkeypatch.setattr(user_kernel, "_on_a_gpu", lambda arguments: tensor)
    yield go.set
    go.set()


def test_a_call_goes_on_with_the_default_until_the_store_is_read(on_gpu: Callable[[], None]) -> None:
    add(torch.ones(80))
    assert CALLS == [32]
    on_gpu()
    deadline = time.monotonic() + 60
    while CALLS[-1] != 64:
        assert time.monotonic() < deadline
        add(torch.ones(80))
    assert add.explain(torch.ones(80)).rung is UserRung.EXACT


def test_explain_and_reload_wait_for_the_store(on_gpu: Callable[[], None]) -> None:
    add(torch.ones(80))
    threading.Timer(0.2, on_gpu).start()
    assert add.explain(torch.ones(80)).rung is UserRung.EXACT
    add.reload()
    add(torch.ones(80))
    assert CALLS[-1] == 64


def test_a_capture_goes_on_with_the_plan_of_before(on_gpu: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    add(torch.ones(80))
    on_gpu()
    deadline = time.monotonic() + 60
    while add._plans:
        assert time.monotonic() < deadline
    monkeypatch.setattr(user_kernel, "is_capturing", lambda tensor: True)
    add(torch.ones(80))
    assert CALLS == [32, 32]
    with pytest.raises(UsageError, match="must have run once"):
        add(torch.ones(96))
