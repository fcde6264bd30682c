"""The flags of a shape, and what they become."""

import inspect
import re
import shlex
from typing import Any

import pytest
import typer

from blocktune.cli.shared.options import ShapeFlags, with_shape_flags
from blocktune.kernels.hardware import device
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import UnknownDeviceError, UsageError
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.runtime.selection.ladder import Candidate, Rung
from blocktune.runtime.selection.reasons import explain_candidate
from blocktune.tuner.measure.device_choice import DEFAULT_DEVICE, choose_device
from tests.support.command_line import CliRunner


def test_sizes_that_are_not_given_follow_from_the_others_and_are_named() -> None:
    flags = ShapeFlags(seq=8192, dim=64)
    assert flags.shape().label == "b2 h32 s8192 d64 bf16"
    assert flags.assumed() == "assumed --batch 2 (batch * seq = 16384), --heads 32 (heads * dim = 2048)"


def test_the_tokens_of_a_decoding_are_its_keys() -> None:
    flags = ShapeFlags(seq=1, dim=128, seq_k=8192)
    assert flags.shape().label == "b2 h16 s1/8192 d128 bf16"
    assert flags.assumed().startswith("assumed --batch 2 (batch * seq-k = 16384)")
    assert ShapeFlags(seq=8192, dim=64, seq_k=77).shape().batch == 2  # more queries than keys
    assert ShapeFlags(seq=4, dim=64, seq_k=1 << 20).shape().batch == 1
    with pytest.raises(UsageError, match="--seq-k 8192"):
        ShapeFlags(seq=1, dim=128).shape()


SHAPES = [
    {},
    {"seqlen_q": 1, "seqlen_k": 1},
    {"seqlen_q": 1, "num_heads": 8, "num_heads_kv": 2, "features": Features(cached=True, page_size=16)},
    {"direction": Direction.BACKWARD, "causal": Causal.UPPER_LEFT, "features": Features(deterministic=True)},
    {"direction": Direction.BACKWARD, "dtype": "float16", "features": Features(mask=MaskKind.BOOLEAN, dropout=True)},
    {"causal": Causal.LOWER_RIGHT, "seqlen_q": 30, "features": Features(window=(127, -1), softcap=True, alibi=True)},
    {"batch": 5, "head_dim_v": 80, "dtype": "float32", "features": Features(varlen=True)},
]


@pytest.mark.parametrize("changes", SHAPES)
def test_the_command_that_an_explanation_suggests_means_the_shape(changes: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"batch": 1, "num_heads": 4, "num_heads_kv": 4, "seqlen_q": 48, "seqlen_k": 64}
    shape = AttentionShape(**(sizes | {"head_dim": 64, "head_dim_v": 64} | changes))
    candidate = Candidate(rung=Rung.DEFAULT, config=KernelConfig("plain", 64, 64, 4, 2), origin=Origin.DEFAULT)
    suggested = re.search(r"`tune run (.*)`", explain_candidate(candidate, shape).reason)
    assert suggested is not None
    seen = []

    @with_shape_flags
    def command(flags: ShapeFlags) -> None:
        seen.append((flags.shape(), flags.assumed()))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, shlex.split(suggested[1]))
    assert result.exit_code == 0, result.output
    assert seen == [(shape, "")]


def test_sizes_that_are_given_are_taken_and_not_named() -> None:
    flags = ShapeFlags(seq=100, dim=80, batch=3, heads=8, kv_heads=2, seq_k=50, dim_v=96, dtype="fp16", causal=True)
    shape = flags.shape()
    assert (shape.batch, shape.num_heads, shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v) == (3, 8, 2, 50, 96)
    assert (shape.dtype, shape.causal) == ("float16", Causal.UPPER_LEFT)
    assert flags.assumed() == ""


def test_the_two_kinds_of_causal_exclude_each_other() -> None:
    assert ShapeFlags(seq=8, seq_k=16, dim=64, causal_lower_right=True).shape().causal is Causal.LOWER_RIGHT
    with pytest.raises(UsageError, match="`--causal` and `--causal-lower-right` exclude each other"):
        ShapeFlags(seq=8, dim=64, causal=True, causal_lower_right=True).shape()


@pytest.mark.parametrize(
    "flags",
    [{"seq": 0}, {"dim": -1}, {"heads": 6, "kv_heads": 4}, {"dtype": "fp4"}, {"batch": 0}],
    ids=lambda flags: ",".join(flags),
)
def test_a_shape_that_breaks_a_rule_is_wrong_use(flags: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ShapeFlags(**({"seq": 64, "dim": 64} | flags)).shape()


def test_a_command_gets_the_shape_flags_beside_its_own() -> None:
    seen = []

    @with_shape_flags
    def command(flags: ShapeFlags, loud: bool = False) -> None:
        seen.append((flags, loud))

    assert {"seq", "dim", "kv_heads", "loud"} <= set(inspect.signature(command).parameters)
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--seq", "128", "--dim", "64", "--kv-heads", "4", "--loud"])
    assert result.exit_code == 0, result.output
    assert seen == [(ShapeFlags(seq=128, dim=64, kv_heads=4), True)]


def test_without_a_name_and_a_gpu_the_default_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present_devices", tuple)
    assert choose_device(None) == device.device_named(DEFAULT_DEVICE)


def test_a_present_device_is_preferred_to_its_catalogue_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    here = replace(device.device_named("h200"), uuid="GPU-1", source="driver")
    other = replace(device.device_named("a100"), uuid="GPU-0", source="driver")
    monkeypatch.setattr(device, "present_devices", lambda: (other, here))
    assert choose_device(None) is other
    assert choose_device("H200") is here
    assert choose_device("l40s").source == "catalogue"


def test_an_unknown_device_is_wrong_use() -> None:
    with pytest.raises(UnknownDeviceError, match="h200"):
        choose_device("h2000")


@pytest.mark.parametrize("command", ["run", "explain", "ladder"])
def test_a_type_without_units_on_the_gpu_is_refused_with_the_way_out(tune, command: str) -> None:
    result = tune(command, "--seq", 1024, "--dim", 64, "--device", "t4")
    assert result.exit_code == 2
    assert "Tesla T4 (compute capability 7.5) has no units for bfloat16" in result.stderr
    assert "Take float16: --dtype fp16." in result.stderr
