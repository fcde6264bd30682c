"""`tune bench`: what it shows, what it writes, how it ends."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.tune.bench import geometric_mean
from blocktune.cli.tune.bench_verdicts import verdict_of
from blocktune.db.records.records import Environment, Regime
from blocktune.kernels.hardware import device
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compare.report import Comparison, Entry, SpeedRatio, Timing
from blocktune.tuner.compare.stock_autotune import StockTuning

GRID = ("--grid", "seq=512,1024 dim=64")
HERE = replace(device.device_named("h200"), uuid="GPU-1", source="driver")


def entry(name: str, median_us: float) -> Entry:
    over = SpeedRatio(median=200.0 / median_us, low=0.99, high=1.01)
    timing = Timing(median_us=median_us, low_us=1.0, high_us=2.0, tflops=5.0, over_cudnn=over, over_best=over)
    return Entry(name=name, timing=timing)


class FakeCompare:
    """Stands in for the use case; `fails_at` is the number of the shape at which it is interrupted."""

    def __init__(self, tuned: Any) -> None:
        self.tuned = tuned
        self.fails_at = 0
        self.problem = ""
        self.further: tuple[Entry, ...] = ()
        self.got: list[dict[str, Any]] = []
        self.compiled: list[str] = []

    def __call__(self, shape: AttentionShape, **given: Any) -> Comparison:
        self.got.append(given)
        if len(self.got) == self.fails_at:
            raise KeyboardInterrupt
        stock = None
        if given["compiler"] is not None:
            stock = StockTuning(
                winner=self.tuned, time_us=1.0, configs=10, failed=1, left_out=2, compiled=5, seconds=60.0,
                compile_seconds=20.0,
            )  # fmt: skip
        entries = (
            entry("tuned", 100.0) if not self.problem else Entry(name="tuned", problem=self.problem),
            Entry(name="paper", problem="no block of this rule fits the device"),
            entry("cudnn", 200.0),
            replace(entry("triton_autotune", 110.0), tuning=stock),
            *self.further,
        )
        return Comparison(shape=shape, regime=given["regime"], entries=entries, rounds=21, seconds=1.0)


@pytest.fixture
def fake(winner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> FakeCompare:
    stand_in = FakeCompare(winner().config)

    @contextmanager
    def no_lock(uuid: str | None, on_wait: object):
        yield

    monkeypatch.setattr("blocktune.tuner.compare.compare.compare", stand_in)
    monkeypatch.setattr(
        "blocktune.tuner.compare.compare.compile_ahead",
        lambda store, device, shapes, compiler: stand_in.compiled.extend(shape.label for shape in shapes),
    )
    monkeypatch.setattr("blocktune.tuner.measure.clock.CudaClock", lambda: None)
    monkeypatch.setattr("blocktune.tuner.measure.telemetry.gpu_lock", no_lock)
    monkeypatch.setattr("blocktune.tuner.measure.telemetry.GpuMonitor", lambda uuid: None)
    environment = Environment(triton="3.6.0", ptxas="12.8", torch="2.13", driver="580", power_limit_w=700)
    monkeypatch.setattr("blocktune.tuner.measure.environment.measuring_environment", lambda *_: environment)
    monkeypatch.setattr(device, "current_device", lambda: HERE)
    return stand_in


def test_a_bench_shows_everybody_and_the_means(tune, fake: FakeCompare) -> None:
    result = tune("bench", *GRID, "--autotune")
    assert result.exit_code == 0, result.output
    for part in (
        "b32 h32 s512 d64 bf16, burst, 21 rounds, fastest rival cuDNN, without FlashAttention-3 and FlashAttention-4\n",
        "over fastest rival",
        "100.0 µs",
        "2.000x (0.990 to 1.010)",
        "paper was not timed: no block of this rule",
        "tried 10 configs in 60 s, compiling 5 of them; about 70 s with an empty cache",
        "ours over cudnn: 2.000x (geometric mean of 2 shapes)",
        "ours over fastest rival: 2.000x (geometric mean of 2 shapes)",
    ):
        assert part in result.stdout, part
    assert result.stderr.splitlines()[:2] == ["1/2 b32 h32 s512 d64 bf16", "2/2 b16 h32 s1024 d64 bf16"]
    assert all(given["compiler"] is not None for given in fake.got)
    assert fake.compiled == ["b32 h32 s512 d64 bf16", "b16 h32 s1024 d64 bf16"]


def test_all_peers_have_lines_and_versions(tune, fake: FakeCompare, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.further = (entry("fa3", 125.0), entry("fa4", 150.0))
    versions = {"fa3": "fa3-fwd 0.0.3", "fa4": "flash-attn-4 4.0.0b36"}
    monkeypatch.setattr("blocktune.tuner.compare.compare.peer_versions", lambda: versions)
    lines = tune("bench", "--seq", 512, "--dim", 64).stdout.splitlines()
    assert lines[0].startswith("NVIDIA H200 with triton 3.6.0, torch 2.13, cudnn ")
    assert lines[0].endswith(", driver 580, fa3-fwd 0.0.3, flash-attn-4 4.0.0b36")
    assert lines[1] == "b32 h32 s512 d64 bf16, burst, 21 rounds, fastest rival FlashAttention-3"
    timed = [line.split()[0] for line in lines if "µs" in line]
    assert timed == ["tuned", "cudnn", "triton_autotune", "fa3", "fa4", "b32"], "the last one is the verdict"


def test_a_tuned_config_with_a_wrong_result_ends_with_7_after_all_rows(tune, fake: FakeCompare, tmp_path: Path) -> None:
    fake.problem = "relative error 1.2 in rows 64.."
    out = tmp_path / "h200.bench.json"
    result = tune("bench", *GRID, "--out", out)
    assert result.exit_code == 7
    assert "b16 h32 s1024 d64 bf16: relative error 1.2" in result.stderr
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_the_regime_reaches_the_use_case(tune, fake: FakeCompare) -> None:
    assert tune("bench", *GRID, "--regime", "sustained").exit_code == 0
    assert {given["regime"] for given in fake.got} == {Regime.SUSTAINED}
    assert {given["compiler"] for given in fake.got} == {None}
    assert tune("bench", *GRID, "--regime", "idle").exit_code == 2


def test_an_interrupted_bench_keeps_its_rows_and_goes_on(
    tune, fake: FakeCompare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTUNE_COMMIT", "c0ffee")
    out = tmp_path / "h200.bench.json"
    fake.fails_at = 2
    assert tune("bench", *GRID, "--out", out).exit_code == 130
    first = json.loads(out.read_text())
    assert (first["schema"], first["format"], first["regime"]) == (1, "blocktune-bench", "burst")
    assert first["device"]["name"] == "NVIDIA H200"
    assert first["device"]["uuid"] is None
    assert first["environment"]["power_limit_w"] == 700
    assert first["rows"][0]["commit"] == "c0ffee"
    assert [row["label"] for row in first["rows"]] == ["b32 h32 s512 d64 bf16"]
    assert first["rows"][0].pop("taken_at") == first["created_at"]
    out.write_text(json.dumps(first | {"created_at": "2026-01-02T03:04:05+00:00"}))  # as older benches have it
    result = tune("bench", "--seq", 1024, "--dim", 64, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    second = json.loads(out.read_text())
    assert [row["shape"]["seqlen_q"] for row in second["rows"]] == [512, 1024]
    assert [row["taken_at"] for row in second["rows"]] == ["2026-01-02T03:04:05+00:00", second["created_at"]]
    assert json.loads(result.stdout) == second
    assert len(list(tmp_path.glob("*.new"))) == 0


@pytest.mark.parametrize("text", ["", "{}", '{"format": "blocktune-bench", "schema": 1, "device": {}, "rows": []}'])
def test_a_file_with_something_else_is_left_alone(tune, fake: FakeCompare, tmp_path: Path, text: str) -> None:
    out = tmp_path / "other.json"
    out.write_text(text)
    result = tune("bench", *GRID, "--out", out)
    assert result.exit_code == 2
    assert "another file" in result.stderr
    assert out.read_text() == text
    assert fake.got == []


def test_without_a_gpu_it_ends_with_4(tune, fake: FakeCompare, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoDeviceError("no GPU")

    monkeypatch.setattr(device, "current_device", none)
    result = tune("bench", *GRID)
    assert (result.exit_code, result.stdout) == (4, "")


def test_the_geometric_mean_is_that_of_the_ratios() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_each_shape_has_a_verdict(tune, fake: FakeCompare) -> None:
    assert "b32 h32 s512 d64 bf16 100.0 µs cuDNN 200.0 µs level, 2.000x" in " ".join(
        tune("bench", *GRID).stdout.split()
    )
    row = {"label": "s", "contenders": [vars_of("tuned", 100.0, 0.9, 0.95), vars_of("cudnn", 90.0, 1.0, 1.0)]}
    assert verdict_of(row) == ("s", "100.0 µs", "cuDNN", "90.0 µs", "slower, 0.925x")
    row["contenders"][0] = vars_of("tuned", 100.0, 1.01, 1.05)
    assert verdict_of(row) == ("s", "100.0 µs", "cuDNN", "90.0 µs", "faster, 1.030x")
    assert verdict_of({"label": "s", "contenders": row["contenders"][:1]}) is None


def vars_of(name: str, median_us: float, low: float, high: float) -> dict[str, Any]:
    """A contender as a bench writes it."""
    return {
        "name": name,
        "timing": {"median_us": median_us, "over_best": {"median": (low + high) / 2, "low": low, "high": high}},
    }


def test_shapes_come_from_a_file_or_from_what_the_program_called(
    tune, fake: FakeCompare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapes.toml").write_text("[mine]\nseq = [512, 640]\ndim = 64\n")
    assert tune("bench", "--shapes", tmp_path / "shapes.toml").exit_code == 0
    assert fake.compiled == ["b32 h32 s512 d64 bf16", "b25 h32 s640 d64 bf16"]
    missed = complete_shape(777, 64)
    monkeypatch.setattr("blocktune.cli.tune.bench.missed_shapes", lambda device, db: (missed,))
    assert tune("bench", "--from-misses").exit_code == 0
    assert fake.compiled[2:] == [missed.label]


def test_functions_of_a_file_are_judged_like_cudnn(
    tune, fake: FakeCompare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rivals.toml"
    path.write_text('[mine]\nfunction = "mine:attend"\n')
    missing = tune("bench", *GRID, "--rivals", path)
    assert (missing.exit_code, fake.got) == (2, [])
    assert "mine:attend cannot be imported" in " ".join(missing.stderr.split())
    Path("mine.py").write_text("def attend(q, k, v): ...\n")
    fake.further = (entry("mine:attend", 50.0),)
    result = tune("bench", *GRID, "--rivals", path)
    assert list(fake.got[0]["rivals"]) == ["mine:attend"]
    assert "fastest rival mine:attend" in result.stdout
    assert "ours over mine:attend: 0.500x" in result.stdout
    assert tune("bench", *GRID, "--rivals", tmp_path / "nothing.toml").exit_code == 2
