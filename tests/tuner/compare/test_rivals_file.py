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


def write_inputs_and_raise(q: Any, k: Any, v: Any) -> torch.Tensor:
    q.mul_(2)
    raise RuntimeError("it has no kernel for this")


def attend_with_lse(q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(q, k, v), q.sum(-1)


def attend_in_half(q: Any, k: Any, v: Any) -> torch.Tensor:
    return attend(q, k, v).half()


def attend_one_head(q: Any, k: Any, v: Any) -> torch.Tensor:
    return attend(q, k, v)[:, :1]


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


def raise_later(q: Any, k: Any, v: Any) -> torch.Tensor:
    """Compute until the three checks in front of the timing are over."""
    calls.append(q)
    if len(calls) > 3:
        raise MemoryError("no workspace is left")
    return attend(q, k, v)


def write_later(q: Any, k: Any, v: Any) -> torch.Tensor:
    calls.append(q)
    if len(calls) > 3:
        k.zero_()
    return attend(q, k, v)


not_a_function = 3


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Entry]:
    """Returns how a rival ends."""
    monkeypatch.setattr(protocol, "REST_SECONDS", 1e-4)
    monkeypatch.setattr(line_up, "ROUNDS_SECONDS", 1e-3)
    answers.clear()
    calls.clear()

    def entry_of(function: str, shape: AttentionShape = SHAPE, **contract: Any) -> Entry:
        """The entry of a function, next to which PyTorch's has its time."""
        question, _ = questions_of(shape, device="cpu", seed=0)
        contenders = LineUp(shape, question, FakeClock(), bind)
        before = [tensor.clone() for tensor in (question.q, question.k, question.v)]
        name = f"{HERE}:{function}"
        contenders.invite_torch("fa2", "MATH")
        contenders.invite_rival(name, Rival(function=name, **contract))
        rounds, _ = contenders.time(Regime.BURST, GpuMonitor(None, own_processes=1))
        other, entry = contenders.timed_entries(rounds)
        assert all(map(torch.equal, before, (question.q, question.k, question.v)))
        assert other.timing is not None or shape.features
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
        ("write_inputs_and_raise", "no kernel for this"),
        ("write_later", "changes its inputs"),
        ("raise_later", "MemoryError: no workspace is left"),
        ("attend_with_lse", "must return a tensor, but returned a tuple"),
        ("attend_in_half", r"must return torch.float32 [2, 4, 64, 32], but returned torch.float16 [2, 4, 64, 32]"),
        ("attend_one_head", r"but returned torch.float32 [2, 1, 64, 32]"),
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


def test_a_turned_result_must_be_one_tensor_too(judged: Callable[..., Entry]) -> None:
    assert "must return a tensor, but returned a tuple" in judged("attend_with_lse", layout="bshd").problem


def test_a_rival_that_raises_in_a_backward_costs_itself_alone(judged: Callable[..., Entry]) -> None:
    entry = judged("raise_later", replace(SHAPE, direction=Direction.BACKWARD), gradients=True)
    assert entry.problem == ""  # its forward ran before


def test_a_file_names_functions(tmp_path: Path) -> None:
    path = tmp_path / "rivals.toml"
    path.write_text(f'[mine]\nfunction = "{HERE}:attend"\nlayout = "bshd"\ngradients = true\n')
    assert rivals_in(path) == {f"{HERE}:attend": Rival(function=f"{HERE}:attend", layout="bshd", gradients=True)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no rival"),
        ("# nothing yet\n", "names no rival"),
        ("[mine]\n", r"a table with `function`.*rivals.toml \[mine\]"),
        (f'[mine]\nfunction = "{HERE}:attend"\nspeed = 2\n', "a table with `function`"),
        (f'mine = "{HERE}:attend"\n', "a table with `function`"),
        (f'[mine]\nfunction = "{HERE}:attend"\nlayout = "dense"\n', r"rivals.toml \[mine\].*must be bhsd or bshd"),
        (f'[mine]\nfunction = "{HERE}:attend"\ngradients = 1\n', r"rivals.toml \[mine\].*must be true or false"),
        ("[mine]\nfunction = 3\n", r"rivals.toml \[mine\].*must be a text"),
        ('[mine]\nfunction = "tuned"\n', r"rivals.toml \[mine\].*`module:function`, but got 'tuned'"),
        ('[mine]\nfunction = ":attend"\n', "`module:function`, but got ':attend'"),
        ('[mine]\nfunction = "no_such_module:attend"\n', r"rivals.toml \[mine\].*no_such_module:attend cannot be"),
        (f'[mine]\nfunction = "{HERE}:nowhere"\n', r"rivals.toml \[mine\].*nowhere"),
        (f'[mine]\nfunction = "{HERE}:not_a_function"\n', r"rivals.toml \[mine\].*is of type int, and no function"),
        (f'[a]\nfunction = "{HERE}:attend"\n[b]\nfunction = "{HERE}:attend"\n', r"rivals.toml \[b\].*twice"),
        ("[mine\n", r"rivals.toml is not TOML"),
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
