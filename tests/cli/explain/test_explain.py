"""`tune explain`: which config it explains, its JSON, its words, and what it refuses."""

import json

import pytest

from blocktune.cli.shared.compiled_config import CompileRequest
from blocktune.kernels.base.paper_rule import paper_config
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses

EXPLAIN = ("explain", "--seq", 8192, "--dim", 64, "--device", "h200")


@pytest.fixture(autouse=True)
def _nothing_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results that ship with the package grow; these tests must not change with them."""
    monkeypatch.setattr("blocktune.runtime.store_reader.sources.shipped_rows", lambda: iter(()))
    monkeypatch.setattr("blocktune.runtime.selection.untuned.shipped_correction", lambda key: None)
    monkeypatch.setattr("blocktune.cli.shared.lookup.shipped_winners", lambda: iter(()))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiles are replaced by fixed resources; the labels of what was requested are kept."""
    labels: list[str] = []

    def compile_(request) -> CompiledCode:
        labels.append(request.config.label)
        warps = request.kernel.total_warps(request.config)
        resources = KernelResources(
            registers=min(168, 2048 // warps), shared_bytes=57_344, num_warps=warps, tensor_cores="wgmma"
        )
        return CompiledCode(resources, SharedAccesses())

    monkeypatch.setattr("blocktune.cli.shared.compiled_config.CompileRequest.compile", compile_)
    return labels


def test_the_stored_winner_is_explained_beside_its_measured_time(tune, winner, compiled) -> None:
    tune.store(winner())
    result = tune(*EXPLAIN, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["schema"], data["measured_us"]) == (1, 812.5)
    assert data["config"] == winner().config.to_json()
    assert data["model_error"] == pytest.approx(data["prediction"]["total_us"] / 812.5 - 1)
    assert "measured on this device for this shape" in data["source"]
    assert data["tensor_cores"] == "wgmma"
    assert {tile["name"] for tile in data["on_chip"]["tiles"]} == {"Q", "K", "V", "S", "P", "O", "m", "l"}
    assert data["traffic"]["standard"]["s_written"] == 64 * 4 * 8192**2
    assert data["rooflines"]["v2_perfect_l2"]["bound_by"] == "arithmetic"
    assert data["explanation"].startswith("Predicted ")


def test_the_words_hold_every_model(tune, winner, compiled) -> None:
    tune.store(winner(time_us=1950.0))
    result = tune(*EXPLAIN)
    assert result.exit_code == 0, result.stderr
    for part in (
        "b2 h32 s8192 d64 bf16 on NVIDIA H200",
        compiled[0],
        "matrix products",
        "standard attention",
        "68,987,912,192",
        "v2, every key in L2",
        "3 of 64 x 64, 2 B each",
        "where the time goes, by the models",
        "together, overlapping",
        "Bound by ",
        "Measured 1,950.0 µs: the model is",
        "3 blocks/SM",
        "waves of 396",
        "tensor cores (wgmma)",
        "through descriptors of wgmma: no bank conflicts to count",
    ):
        assert part in result.stdout
    assert "assumed --batch 2" in result.stderr


def test_a_config_that_the_model_is_far_from_gets_no_advice(tune, winner, compiled) -> None:
    tune.store(winner())
    text = tune(*EXPLAIN).stdout
    assert "The model does not explain this config" in text
    for claim in ("where the time goes", "Bound by", "To lift", "Exponentials take"):
        assert claim not in text
    for fact in ("Measured 812.5 µs: the model is", "68,987,912,192", "3 blocks/SM", "tensor cores (wgmma)"):
        assert fact in text
    data = json.loads(tune(*EXPLAIN, "--json").stdout)
    assert (data["is_explained"], data["prediction"]["binding"]) == (False, None)


def test_the_paper_s_block_rule_stands_beside_the_config(tune, winner, compiled) -> None:
    tune.store(winner())
    words = (*EXPLAIN, "--kernel", "flash_fwd")
    data = json.loads(tune(*words, "--json").stdout)
    rule = data["paper"]
    assert (rule["config"]["kernel"], rule["config"]["block_m"], rule["config"]["block_n"]) == ("flash_fwd", 64, 128)
    assert rule["predicted_us"] > 0
    assert (rule["measured_us"], rule["problem"], rule["formula"]) == (None, "", {"br": 64, "bc": 454})
    assert len(compiled) == 2
    said = tune(*words).stdout
    assert f"The FlashAttention paper's heuristic gives {compiled[1]}: predicted " in said
    assert "Bc = 454; the kernel has block_m = 64 and block_n = 128, so that 4 tiles take the place of one." in said
    itself = tune(*words, "--block-m", 64, "--block-n", 128, "--warps", 4, "--stages", 1, "--json")
    assert json.loads(itself.stdout)["paper"] is None
    backward = tune(*EXPLAIN, "--direction", "backward", "--json")
    assert json.loads(backward.stdout)["paper"] is None, "the rule is one of the forward"


def test_the_paper_s_rule_keeps_the_time_that_the_finals_took(tune, winner, compiled) -> None:
    kernel, limits = get_kernel(winner().paper.kernel), device_named("h200").limits  # whose rule is compared with
    assert winner().paper == paper_config(kernel, winner().shape, limits)
    config = kernel.default_config(winner().shape, limits)
    tune.store(winner(config=config, kernel_hash=kernel.source_hash, paper_time_us=901.25))
    result = tune(*EXPLAIN, "--json")
    assert json.loads(result.stdout)["paper"]["measured_us"] == 901.25
    assert "measured 901.2 µs. Its formula gives Br = 64" in tune(*EXPLAIN).stdout


def test_a_rule_that_does_not_compile_is_told(tune, compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = CompileRequest.compile

    def compile_(request: CompileRequest) -> CompiledCode:
        if request.config.block_n == 128:
            raise NoFeasibleConfigError("such blocks do not compile.")
        return fine(request)

    monkeypatch.setattr(CompileRequest, "compile", compile_)
    words = (*EXPLAIN, "--kernel", "flash_fwd", "--block-n", 64)
    assert "such blocks do not compile" in json.loads(tune(*words, "--json").stdout)["paper"]["problem"]
    assert "The FlashAttention paper's heuristic gives flash_fwd 64x128 w4 s1 " in tune(*words).stdout


def test_flags_change_the_winner_and_then_its_time_is_not_claimed(tune, winner, compiled) -> None:
    tune.store(winner())
    data = json.loads(tune(*EXPLAIN, "--stages", 2, "--param", "schedule=0", "--json").stdout)
    assert (data["config"]["num_stages"], data["config"]["schedule"], data["config"]["block_m"]) == (2, 0, 128)
    assert (data["source"], data["measured_us"], data["model_error"]) == ("as given", None, None)


def test_a_neighbour_s_time_is_not_claimed_for_this_shape(tune, winner, compiled) -> None:
    tune.store(winner())
    data = json.loads(tune("explain", "--seq", 4096, *EXPLAIN[3:], "--json").stdout)
    assert data["config"] == winner().config.to_json()
    assert data["measured_us"] is None
    assert "b2 h32 s8192" in data["source"]


def test_without_results_the_default_is_explained_and_nothing_is_made(tune, compiled) -> None:
    result = tune(*EXPLAIN)
    assert result.exit_code == 0
    assert "the kernel's default" in result.stdout
    assert "No measurement of this config" in result.stdout
    assert not tune.db.exists()


def test_a_kernel_that_is_named_starts_from_its_default(tune, winner, compiled) -> None:
    tune.store(winner())
    data = json.loads(tune(*EXPLAIN, "--kernel", "flash_fwd_tma", "--causal", "--block-n", 32, "--json").stdout)
    assert (data["config"]["kernel"], data["config"]["block_n"], data["shape"]["causal"]) == (
        "flash_fwd_tma",
        32,
        "upper_left",
    )


def test_a_backward_shows_its_launches(tune, compiled) -> None:
    words = ("explain", "--seq", 4096, "--dim", 128, "--direction", "backward", "--device", "h200")
    result = tune(*words)
    assert result.exit_code == 0, result.stderr
    for part in (
        "queries and gradients from L2",
        "this kernel, launches read once",
        "launch ",
        "delta",
        "dk_dv",
        "dQ on",
    ):
        assert part in result.stdout
    data = json.loads(tune(*words, "--json").stdout)
    assert data["shape"]["direction"] == "backward"
    assert data["traffic"]["own"]["dq"]["dq_written"] == 4 * 16 * 4096 * 128 * 2


def test_decoding_shows_what_splits_cost(tune, compiled) -> None:
    words = ("explain", "--seq", 1, "--seq-k", 8192, "--dim", 128, "--heads", 32, "--kv-heads", 8, "--batch", 1)
    data = json.loads(tune(*words, "--device", "a100_sxm4_80", "--param", "splits=16", "--json").stdout)
    assert data["traffic"]["own"]["merge"]["partial_read"] == 16 * 32 * 128 * 4
    assert data["block_intensity"] == 4
    assert data["rooflines"]["own_perfect_l2"]["bound_by"] == "memory"
    data = json.loads(tune(*words, "--device", "h200", "--param", "splits=16", "--json").stdout)
    assert data["config"]["kernel"] == "flash_decode_hopper"
    assert data["traffic"]["own"]["decode"]["partial_read"] == 16 * 32 * 128 * 4


def test_features_are_explained(tune, compiled) -> None:
    words = ("explain", "--seq", 4096, "--dim", 64, "--features", "window=1023:0+boolean", "--device", "a100_sxm4_80")
    data = json.loads(tune(*words, "--json").stdout)
    assert data["config"]["kernel"] == "flash_fwd_general"
    assert data["traffic"]["own"]["forward"]["mask_read"] > 0
    assert data["density"] == 1.0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--kernel", "no_such_kernel"), 2),
        (("--param", "colour=3"), 2),
        (("--block-m", -64), 2),
        (("--dim-v", 1024), 3),
    ],
    ids=str,
)
def test_wrong_use_says_the_way_out(tune, compiled, words: tuple[object, ...], code: int) -> None:
    result = tune(*EXPLAIN, *words)
    assert result.exit_code == code
    assert result.stdout == ""
    assert len(result.stderr) > 20
    assert compiled == []


@pytest.mark.slow
def test_an_old_card_is_explained_without_a_gpu(tune) -> None:
    words = ("explain", "--seq", 1024, "--dim", 16, "--dtype", "fp16", "--device", "rtx2070", "--kernel", "flash_fwd")
    result = tune(*words, "--block-m", 32, "--block-n", 32, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["tensor_cores"] == "none"
    shared = data["shared_accesses"]
    assert shared["load_excess"] > 0, "its products read rows of 64 bytes, column by column"
    assert shared["ways"] == shared["load_wavefronts"] / shared["loads"]
    assert f"which a profiler calls a {shared['ways']:.1f}-way bank conflict" in data["explanation"]
    assert data["occupancy"]["cc"] == device_named("rtx2070").limits.name == "7.5"
    shape = complete_shape(1024, 16, dtype="fp16")
    assert data["shape"] == shape.to_json() | {"label": shape.label}
    assert "Triton uses none below compute capability 8.0" in data["explanation"]
