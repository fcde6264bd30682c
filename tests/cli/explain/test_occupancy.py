"""`tune occupancy`: the contract of its JSON, the words, and what it refuses."""

import json

import pytest

from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.tuner.occupancy.compiled_code import CompiledCode

RAW = ("occupancy", "--cc", "9.0", "--warps", 4, "--regs", 168, "--shared", 115712)


def test_the_json_holds_the_contract(tune) -> None:
    result = tune(*RAW, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["schema"] == 1
    assert (data["blocks_per_sm"], data["active_warps"], data["occupancy"]) == (2, 8, 0.125)
    assert data["limits"] == {"warps": 16, "blocks": 32, "registers": 3, "shared_memory": 2, "barriers": 64}
    assert data["limiters"] == ["shared_memory"]


def test_the_words_say_what_would_lift_the_limit(tune) -> None:
    result = tune(*RAW)
    assert result.exit_code == 0
    for part in ("2 blocks/SM", "shared memory", "115,712 B", "1,024 B reserved", "≤ 76,800 B", "not the goal"):
        assert part in result.stdout


def test_a_device_stands_for_its_compute_capability(tune) -> None:
    by_device = tune("occupancy", "--device", "h200", *RAW[3:], "--json")
    assert json.loads(by_device.stdout) == json.loads(tune(*RAW, "--json").stdout)


def test_a_block_that_does_not_fit_is_an_answer(tune) -> None:
    data = json.loads(tune(*RAW[:-1], 300_000, "--json").stdout)
    assert (data["blocks_per_sm"], data["limiters"]) == (0, ["shared_memory"])


@pytest.mark.parametrize(
    "words",
    [
        ("--cc", "9.0", "--warps", 4),
        ("--cc", "5.0", *RAW[3:]),
        ("--cc", "nine", *RAW[3:]),
        ("--cc", "9.0", "--device", "h200", *RAW[3:]),
        ("--cc", "9.0", "--warps", 0, "--regs", 1, "--shared", 1),
        ("--cc", "9.0", "--warps", 4, "--regs", -1, "--shared", 1),
        ("--device", "h200", "--kernel", "flash_fwd"),
        ("--device", "h200", "--kernel", "no_such_kernel", "--dim", 64),
        ("--device", "h200", "--kernel", "flash_fwd", "--dim", 64, "--block-m", 96),
        ("--device", "h200", "--kernel", "flash_fwd_hopper", "--dim", 64, "--block-m", 64),
        ("--device", "h200", "--kernel", "flash_fwd", "--dim", 64, "--param", "colour=3"),
        ("--device", "h200", "--kernel", "flash_fwd", "--dim", 64, "--param", "colour"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_wrong_use_says_the_way_out(tune, words: tuple[object, ...]) -> None:
    result = tune("occupancy", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr) > 20


def test_blocks_that_the_kernel_does_not_have_are_told(tune) -> None:
    result = tune("occupancy", "--device", "h200", "--kernel", "flash_fwd", "--dim", 64, "--block-m", 96)
    assert result.exit_code == 2
    choices = get_kernel("flash_fwd").parameters["block_m"]
    assert f"`block_m` of flash_fwd must be one of {choices}, but got 96." in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "words", [("--regs", 128), ("--shared", 0), ("--static-shared", 64), ("--barriers", 4)], ids=str
)
def test_resources_beside_a_kernel_are_refused_since_the_compiler_gives_them(tune, words: tuple[object, ...]) -> None:
    result = tune("occupancy", "--device", "h100", "--kernel", "flash_fwd", "--dim", 64, *words)
    assert result.exit_code == 2
    assert f"{words[0]} is given too" in result.stderr


@pytest.mark.parametrize(
    ("kernel", "blocks"),
    [
        ("flash_v1", 2 * 32),  # a block a head, whatever the tiles
        ("flash_fwd", 2 * 32 * 8192 // 128),
        ("flash_bwd_split", 2 * 32 * 8192 // 64),  # its blocks own keys
    ],
)
def test_the_waves_are_those_of_the_kernel_s_own_grid(
    tune, monkeypatch: pytest.MonkeyPatch, kernel: str, blocks: int
) -> None:
    resources = KernelResources(registers=255, shared_bytes=57_344, num_warps=8, tensor_cores="wgmma")
    monkeypatch.setattr(
        "blocktune.cli.shared.compiled_config.CompileRequest.compile", lambda _: CompiledCode(resources, None)
    )
    result = tune("occupancy", "--device", "h200", "--kernel", kernel, "--dim", 64)
    assert f"The grid of {blocks:,} blocks is {blocks / 132:.2f} waves of 132" in result.stdout


FORM = ("occupancy", "--device", "h200", "--kernel", "flash_fwd", "--dim", 128)
TILE = ("--block-m", 128, "--block-n", 64, "--warps", 4, "--stages", 3)


@pytest.mark.slow
def test_a_kernel_is_compiled_without_a_gpu_and_explained(tune) -> None:
    result = tune(*FORM, *TILE, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["config"]["block_m"] == 128
    assert data["resources"]["tensor_cores"] == "wgmma"
    assert data["resources"]["shared_bytes"] > 65_536
    assert data["blocks_per_sm"] == min(limit for limit in data["limits"].values() if limit is not None)
    assert "compiling flash_fwd 128x64" in result.stderr
    assert "num_stages 3→2" in data["explanation"]


def test_a_plot_shows_the_kernel_on_three_curves_of_at_most_80_columns(tune) -> None:
    plain, plotted = tune(*RAW).stdout, tune(*RAW, "--plot").stdout
    assert plotted.startswith(plain)
    lines = plotted[len(plain) :].splitlines()
    assert max(map(len, lines)) <= 80
    titles = ("registers per thread", "dynamic shared memory of a block, KiB", "warps of a block")
    for title, own in zip(titles, ("168", "113", "4"), strict=True):
        start = lines.index(title)
        level = next(line for line in lines[start + 1 :] if "●" in line)
        scale = next(line for line in lines[start + 1 :] if own in line.split())
        assert level.split()[0] == "2"  # blocks/SM
        middle = scale.index(f" {own}") + 1 + (len(own) - 1) // 2
        assert abs(level.index("●") - middle) <= 1


def test_curves_are_in_the_json_on_request(tune) -> None:
    assert "curves" not in json.loads(tune(*RAW, "--json").stdout)
    curves = json.loads(tune(*RAW, "--plot", "--json").stdout)["curves"]
    assert curves["shared_bytes"]["steps"][-1][1] == 1
    assert curves["num_warps"]["last"] == 32


def test_a_block_that_does_not_fit_is_drawn_too(tune) -> None:
    result = tune(*RAW[:-1], 300_000, "--plot")
    assert result.exit_code == 0
    assert result.stdout.count("●") == 4  # three curves and the line that says what it is


def test_a_kernel_of_which_many_blocks_fit_stands_in_the_top_line(tune) -> None:
    lines = tune("occupancy", "--cc", "9.0", "--warps", 1, "--regs", 32, "--shared", 0, "--plot").stdout.splitlines()
    assert [line.split()[0] for line in lines if "●" in line][1:] == ["≥12", "≥12", "≥12"]
