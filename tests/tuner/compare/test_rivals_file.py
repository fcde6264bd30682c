"""Functions of a file as contenders: their contract, their check, and who is told apart from attention."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.db.records.records import Regime
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.compare import line_up
from blocktune.tuner.compare.line_up import LineUp
from blocktune.tuner.compare.report import Entry
from blocktune.tuner.compare.rivals_file import Rival, rivals_in
from blocktune.tuner.correctness.checks_of_shape import questions_of
from blocktune.tuner.measure import protocol
from blocktune.tuner.measure.telemetry import GpuMonitor
from tests.support.fakes.ladder_fakes import FakeClock, bind

HERE = "tests.tuner.compare.test_rivals_file"
SHAPE = AttentionShape(
    batch=2, num_heads=4, num_heads_kv=2, seqlen_q=64, seqlen_k=64, head_dim=32, head_dim_v=32, dtype="float32"
)
CONTRACT = {"causal": "is_causal", "scale": "sm_scale"}


def attend(q: Any, k: Any, v: Any, is_causal: bool = False, sm_scale: float | None = None) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=sm_scale, enable_gqa=True
    )


def attend_turned(q: Any, k: Any, v: Any) -> torch.Tensor:
    return attend(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


def attend_wrongly(q: Any, k: Any, v: Any) -> torch.Tensor:
    return attend(q, k, v, sm_scale=0.5)


def write_inputs(q: Any, k: Any, v: Any) -> torch.Tensor:
    q.mul_(2)
    return attend(q, k, v)


answers: dict[int, torch.Tensor] = {}


def remember(q: Any, k: Any, v: Any) -> torch.Tensor:
    if v.data_ptr() not in answers:
        answers[v.data_ptr()] = attend(q, k, v)
    return answers[v.data_ptr()]


calls: list[torch.Tensor] = []


def remember_later(q: Any, k: Any, v: Any) -> torch.Tensor:
    """Compute until the three checks in front of the timing are over."""
    if len(calls) < 3:
        calls.append(attend(q, k, v))
    return calls[-1]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Entry]:
    """Returns how a rival ends."""
    monkeypatch.setattr(protocol, "REST_SECONDS", 1e-4)
    monkeypatch.setattr(line_up, "ROUNDS_SECONDS", 1e-3)
    answers.clear()
    calls.clear()

    def entry_of(function: str, shape: AttentionShape = SHAPE, **contract: Any) -> Entry:
        question, _ = questions_of(shape, device="cpu", seed=0)
        contenders = LineUp(shape, question, FakeClock(), bind)
        name = f"{HERE}:{function}"
        contenders.invite_rival(name, Rival(function=name, **contract))
        rounds, _ = contenders.time(Regime.BURST, GpuMonitor(None, own_processes=1))
        (entry,) = contenders.timed_entries(rounds)
        return entry

    return entry_of


@pytest.mark.parametrize(
    ("function", "shape", "contract"),
    [
        ("attend", replace(SHAPE, causal=Causal.UPPER_LEFT), CONTRACT),
        ("attend_turned", SHAPE, {"layout": "bshd"}),
        ("attend", replace(SHAPE, direction=Direction.BACKWARD), CONTRACT | {"gradients": True}),
    ],
)
def test_a_rival_is_timed_as_its_contract_says(
    judged: Callable[..., Entry], function: str, shape: AttentionShape, contract: dict[str, Any]
) -> None:
    entry = judged(function, shape, **contract)
    assert entry.problem == ""
    assert entry.timing is not None
    assert entry.timing.over_best is not None  # it is the fastest rival itself
    assert entry.timing.over_best.median == 1.0


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("attend_wrongly", "relative error"),
        ("write_inputs", "changes its inputs"),
        ("remember", "do not follow from its inputs"),
        ("remember_later", "do not follow from its inputs"),
        ("nowhere", "nowhere"),
    ],
)
def test_who_computes_something_else_gets_no_time(judged: Callable[..., Entry], function: str, problem: str) -> None:
    entry = judged(function)
    assert problem in entry.problem
    assert entry.timing is None


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (replace(SHAPE, causal=Causal.UPPER_LEFT), "no causal mask by its contract"),
        (replace(SHAPE, direction=Direction.BACKWARD), "no gradients by its contract"),
        (replace(SHAPE, features=Features.parse("softcap")), "without features"),
    ],
)
def test_shapes_outside_the_contract_are_not_asked_for(
    judged: Callable[..., Entry], shape: AttentionShape, problem: str
) -> None:
    assert problem in judged("attend", shape).problem


def test_a_file_names_functions(tmp_path: Path) -> None:
    path = tmp_path / "rivals.toml"
    path.write_text('[mine]\nfunction = "m:attend"\nlayout = "bshd"\ngradients = true\n')
    assert rivals_in(path) == {"m:attend": Rival(function="m:attend", layout="bshd", gradients=True)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[mine]\n", "a table with `function`"),
        ('[mine]\nfunction = "m:f"\nspeed = 2\n', "a table with `function`"),
        ('mine = "m:f"\n', "a table with `function`"),
        ('[mine]\nfunction = "m:f"\nlayout = "dense"\n', "must be bhsd or bshd"),
        ('[mine]\nfunction = "m:f"\ngradients = 1\n', "must be true or false"),
        ("[mine]\nfunction = 3\n", "must be a text"),
        ('[a]\nfunction = "m:f"\n[b]\nfunction = "m:f"\n', "names m:f twice"),
        ("[mine\n", "is not TOML"),
    ],
)
def test_a_file_in_disorder_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "rivals.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem):
        rivals_in(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.toml"):
        rivals_in(tmp_path / "nothing.toml")
