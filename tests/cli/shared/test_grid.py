"""`--grid`: which shapes it stands for, and what it refuses."""

import json
from typing import Any

import pytest

from blocktune.cli.shared.grid import Grid, parse_grid
from blocktune.cli.shared.options import ShapeFlags
from blocktune.kernels.hardware import device
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.search.report import TuningReport

NONE_GIVEN: dict[str, Any] = {
    "seq": None, "dim": None, "batch": None, "heads": None, "kv_heads": None, "seq_k": None, "dim_v": None,
    "dtype": "bf16", "causal": False, "causal_lower_right": False,
}  # fmt: skip


def test_a_grid_is_every_combination_the_last_name_fastest() -> None:
    grid = Grid.of(NONE_GIVEN | {"batch": 4}, "seq=512,1024 dim=64,128 causal=0,1")
    assert grid.many
    assert [(flags.seq, flags.dim, flags.causal) for flags in grid.flags] == [
        (seq, dim, causal) for seq in (512, 1024) for dim in (64, 128) for causal in (False, True)
    ]
    assert {flags.batch for flags in grid.flags} == {4}
    assert len(grid.shapes()) == 8


def test_flags_and_grid_complete_each_other() -> None:
    grid = Grid.of(NONE_GIVEN | {"dim": 64}, "seq=512 kv-heads=4 dtype=fp16,bf16")
    assert [shape.label for shape in grid.shapes()] == ["b32 h32/4 s512 d64 fp16", "b32 h32/4 s512 d64 bf16"]


def test_without_a_grid_there_is_one_shape() -> None:
    grid = Grid.of(NONE_GIVEN | {"seq": 512, "dim": 64}, None)
    assert (grid.flags, grid.many) == ((ShapeFlags(seq=512, dim=64),), False)


def test_a_shape_stands_once() -> None:
    assert len(Grid.of(NONE_GIVEN, "seq=512,512 dim=64 batch=32,32").shapes()) == 1
    assert parse_grid("seq=512,512") == {"seq": (512,)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "at least one word"),
        ("seq", "'seq'"),
        ("sequence=512", "'sequence=512'"),
        ("seq=512 seq=1024", "twice"),
        ("seq=512, dim=64", "must be an integer, but got ''"),
        ("seq=many dim=64", "must be an integer, but got 'many'"),
        ("seq=512 dim=64 causal=yes", "must be 0 or 1"),
        ("seq=512 dim=64 dtype=", "must be a name"),
        ("seq=512", "--dim"),
        ("dim=64", "--seq"),
    ],
)
def test_what_is_no_grid_is_refused_with_an_example(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        Grid.of(NONE_GIVEN, text)
    assert reason in str(caught.value)
    assert "For example: --grid" in str(caught.value)


def test_a_size_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="--grid and --seq both give"):
        Grid.of(NONE_GIVEN | {"seq": 512}, "seq=512 dim=64")


@pytest.mark.parametrize(
    ("given", "missing"), [({}, "--seq and --dim"), ({"seq": 512}, "--dim"), ({"dim": 64}, "--seq")], ids=str
)
def test_sizes_that_are_missing_are_named_in_words(given: dict[str, int], missing: str) -> None:
    with pytest.raises(UsageError, match=rf"with both\. Missing: {missing}\. For"):
        Grid.of(NONE_GIVEN | given, None)


def test_sizes_that_are_not_given_are_named_for_many_shapes_too() -> None:
    assert Grid.of(NONE_GIVEN, "seq=512 dim=64").assumed() == (
        "assumed --batch (batch * seq = 16384), --heads (heads * dim = 2048) where they are not given"
    )
    assert Grid.of(NONE_GIVEN | {"heads": 8}, "seq=512 dim=64 batch=2").assumed() == ""
    assert Grid.of(NONE_GIVEN | {"seq": 512, "dim": 64, "batch": 1}, None).assumed() == (
        "assumed --heads 32 (heads * dim = 2048)"
    )


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize("words", [(), ("--seq", 512), ("--grid", "seq=512"), ("--grid", "seq=512 dim=0")], ids=str)
def test_the_commands_end_with_2(tune, command: str, words: tuple[object, ...]) -> None:
    result = tune(command, *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


class ManyRuns:
    """Stands in for the use case: one shape has no result."""

    def __init__(self, report: TuningReport) -> None:
        self.report = report
        self.labels: list[str] = []
        self.compilers: list[Any] = []

    def __call__(self, shape: AttentionShape, **given: Any) -> TuningReport:
        from dataclasses import replace

        self.labels.append(shape.label)
        self.compilers.append(given["compiler"])
        if shape.head_dim == 128:
            raise NoFeasibleConfigError("nothing fits")
        return replace(self.report, best=replace(self.report.best, shape=shape))


@pytest.fixture
def runs(winner, monkeypatch: pytest.MonkeyPatch) -> ManyRuns:
    report = TuningReport(
        best=winner(), reason="", occupancy=None, outcomes={}, resumed=0, feasible=1, dropped={}, unsupported={},
        seconds=1.0, stored=True,
    )  # fmt: skip
    stand_in = ManyRuns(report)
    monkeypatch.setattr("blocktune.tuner.search.tune.tune", stand_in)
    monkeypatch.setattr(device, "present_devices", tuple)
    return stand_in


def test_a_grid_is_tuned_with_one_farm_and_a_line_each(tune, runs: ManyRuns) -> None:
    result = tune("run", "--grid", "dim=64 seq=512,1024 causal=0,1")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == runs.labels
    assert len(lines) == 4
    assert "measured 812.5 µs flash_fwd 128x64 w4 s3" in lines[0]
    assert all(compiler is runs.compilers[0] for compiler in runs.compilers)


def test_a_shape_without_a_result_does_not_stop_the_others(tune, runs: ManyRuns) -> None:
    result = tune("run", "--grid", "dim=128,64 seq=512", "--json")
    assert result.exit_code == 3
    assert "nothing fits" in result.stderr
    data = json.loads(result.stdout)
    assert [run["shape"]["head_dim"] for run in data["runs"]] == [64]


def test_a_grid_of_too_many_shapes_is_refused_at_once() -> None:
    many = ",".join(map(str, range(8, 1008)))
    with pytest.raises(UsageError, match="At most 10,000 shapes"):
        Grid.of(NONE_GIVEN, f"seq={many} dim={many} batch={many} heads={many}")
