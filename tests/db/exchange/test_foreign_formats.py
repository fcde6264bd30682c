"""Winners in the formats of others."""

import ast
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import FlexKernelOptions

from blocktune.db.exchange.document import Document, document_from
from blocktune.db.exchange.foreign_formats import ExportFormat, exported_files
from blocktune.db.exchange.triton_module import TritonEntry, triton_module
from blocktune.db.records.records import AnyBest, Best, KernelBest, Outcome, Trial
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import ImportRejectedError, NothingMeasuredError, UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig, LaunchProblem

TILE = KernelConfig("flash_fwd_hopper", 192, 128, 4, 4, extra=(("keep_p", 1),))
SHAPE = AttentionShape(batch=4, num_heads=32, num_heads_kv=8, seqlen_q=4096, seqlen_k=4096, head_dim=64, head_dim_v=64)


def document(*bests: AnyBest, trials: tuple[Trial, ...] = ()) -> Document:
    return document_from(bests[0].device, bests, trials)


def only(files: dict[str, str]) -> tuple[str, str]:
    (entry,) = files.items()
    return entry


def loaded(text: str, tmp_path: Path) -> Any:
    """The module with this text."""
    path = tmp_path / "configs.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("configs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_triton_configs_are_a_module_that_triton_takes(best: Best, tmp_path: Path) -> None:
    predicted = replace(best, shape=SHAPE, config=TILE, origin=Origin.PREDICTED, time_us=None)
    name, text = only(exported_files(document(best, predicted), ExportFormat.TRITON))
    configs = loaded(text, tmp_path).CONFIGS
    assert name == "NVIDIA_H200.py"
    config = configs["flash_fwd_hopper", SHAPE.label]
    assert config.kwargs == {"BLOCK_M": 192, "BLOCK_N": 128, "KEEP_P": 1}
    assert (config.num_warps, config.num_stages) == (4, 4)
    assert set(configs) == {("flash_fwd", best.shape.label), ("flash_fwd_hopper", SHAPE.label)}
    assert "# predicted, not timed" in text
    assert "# measured, 99.5 us" in text


def test_a_device_name_cannot_leave_its_text_or_its_folder(best: Best) -> None:
    hostile = replace(best, device=replace(best.device, name='../x"""\nimport os\n"""'))
    name, text = only(exported_files(document(hostile), ExportFormat.TRITON))
    assert "/" not in name
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)]
    assert [alias.name for node in imports for alias in node.names] == ["triton"]


def test_tuned_functions_are_in_the_module_of_triton(best: Best, tmp_path: Path) -> None:
    problem = LaunchProblem.of({"name": 'a"]\nimport os', "n": 3})
    config = LaunchConfig("my.module:softmax", (("BLOCK", 1024), ("num_warps", 8)))
    user: KernelBest = Best(
        device=best.device,
        environment=best.environment,
        shape=KernelProblem(config.kernel, problem),
        config=config,
        kernel_hash=best.kernel_hash,
        origin=Origin.MEASURED,
        time_us=5.0,
        default=config,
    )
    _, text = only(exported_files(document(best, user), ExportFormat.TRITON))
    found = loaded(text, tmp_path).CONFIGS["my.module:softmax", problem.label]
    assert (found.kwargs, found.num_warps) == ({"BLOCK": 1024}, 8)
    assert [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)][1:] == []


HOSTILE_TEXTS = [
    "x\n    0: __import__('os').system('id'),#",
    "x\r    0: 1,",
    "f'{__import__(\"os\")}'",
    '"); import os; ("',
    "\\",
    "\\N{BULLET}",
    "\x00",
    "\ud800",
    "\U0001f600",
    '"""',
]


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
@pytest.mark.parametrize("place", ["kernel", "label", "worth", "device"])
def test_no_text_becomes_more_of_the_module_than_a_text(text: str, place: str, tmp_path: Path) -> None:
    entry = TritonEntry(kernel="m:f", label="x=1", meta={"BLOCK": -4}, options={"num_warps": 4}, worth="measured")
    device = text if place == "device" else "NVIDIA H200"
    if place != "device":
        entry = replace(entry, **{place: text})
    try:
        written = triton_module(device, [entry, replace(entry, label="x=2")])
    except UsageError:
        assert place == "worth"  # a comment alone has no quotes around it
        return
    module = loaded(written, tmp_path)
    assert device == module.DEVICE
    assert list(module.CONFIGS) == [(entry.kernel, entry.label), (entry.kernel, "x=2")]
    assert module.CONFIGS[entry.kernel, entry.label].kwargs == {"BLOCK": -4}


@pytest.mark.parametrize("worth", ["x\n    0: 1,#", "x\r    0: 1,#", "x\n}\nimport os\n{", "x\x00", "x\n# more"])
def test_a_comment_of_two_lines_is_refused(worth: str) -> None:
    entry = TritonEntry(kernel="m:f", label="x=1", meta={}, options={}, worth=worth)
    with pytest.raises(UsageError, match="nothing but winners"):
        triton_module("NVIDIA H200", [entry])


def test_a_winner_of_a_tuned_function_is_checked_before_it_is_written(best: Best) -> None:
    config = LaunchConfig("m:f", (("BLOCK", 1024),))
    user: KernelBest = Best(
        device=best.device,
        environment=best.environment,
        shape=KernelProblem(config.kernel, LaunchProblem(())),
        config=config,
        origin=Origin.MEASURED,
        kernel_hash="x\n    0: __import__('os').system('id'),#",
        time_us=5.0,
        default=config,
    )
    with pytest.raises(ImportRejectedError, match="16 hexadecimal digits"):
        exported_files(document(best, user), ExportFormat.TRITON)


def test_vllm_files_are_named_by_what_is_fixed_and_keyed_by_length(best: Best) -> None:
    longer = replace(SHAPE, batch=1, seqlen_q=16384, seqlen_k=16384)
    smaller_batch = replace(SHAPE, batch=1)
    rows = [
        replace(best, shape=longer, config=replace(TILE, block_m=128)),
        replace(best, shape=SHAPE, config=TILE),
        replace(best, shape=smaller_batch, config=replace(TILE, block_m=64)),
        replace(best, shape=replace(SHAPE, seqlen_q=1), config=TILE, origin=Origin.PREDICTED),
    ]
    name, text = only(exported_files(document(*rows), ExportFormat.VLLM))
    assert name == (
        "kernel=flash_fwd_hopper,heads=32,heads_kv=8,head_dim=64,head_dim_v=64,causal=none,dtype=bfloat16,"
        "device_name=NVIDIA_H200.json"
    )
    content = json.loads(text)
    assert content.pop("triton_version") == best.environment.triton
    table = {int(key): value for key, value in content.items()}  # as vLLM reads it
    assert list(table) == [4096, 16384]
    assert table[4096] == {"BLOCK_SIZE_M": 192, "BLOCK_SIZE_N": 128, "KEEP_P": 1, "num_warps": 4, "num_stages": 4}


def test_vllm_files_tell_decoding_and_features_apart(best: Best) -> None:
    rows = [
        replace(best, shape=SHAPE),
        replace(best, shape=replace(SHAPE, seqlen_q=1)),
        replace(best, shape=replace(SHAPE, features=Features(window=(127, 3)))),
    ]
    names = exported_files(document(*rows), ExportFormat.VLLM)
    assert len(names) == 3
    assert any(",queries=1," in name for name in names)
    assert any(",features=window_127_3," in name for name in names)


def test_flex_options_are_those_of_the_fastest_config_like_its_template(best: Best, trial: Trial) -> None:
    slow = replace(trial, shape=SHAPE, config=KernelConfig("flash_fwd", 64, 64, 4, 2), time_us=120.0)
    fast = replace(trial, shape=SHAPE, config=KernelConfig("flash_fwd_tma", 128, 64, 8, 3), time_us=110.0)
    too_wide = replace(trial, shape=SHAPE, config=KernelConfig("flash_fwd", 256, 64, 8, 3), time_us=100.0)
    wrong = replace(
        slow, config=KernelConfig("flash_fwd", 32, 32, 4, 1), time_us=None, outcome=Outcome.WRONG_RESULT, samples_us=()
    )
    winner = replace(best, shape=SHAPE, config=TILE)
    backward = replace(best, shape=replace(SHAPE, direction=Direction.BACKWARD))
    source = document(winner, backward, trials=(slow, fast, too_wide, wrong))
    name, text = only(exported_files(source, ExportFormat.FLEX))
    assert name == "NVIDIA_H200.flex.json"
    assert json.loads(text)["kernel_options"] == {
        SHAPE.label: {
            "fwd_BLOCK_M": 128,
            "fwd_BLOCK_N": 64,
            "fwd_num_warps": 8,
            "fwd_num_stages": 3,
            "fwd_USE_TMA": True,
        }
    }


def test_flex_attention_knows_the_options(best: Best) -> None:
    _, text = only(exported_files(document(replace(best, shape=SHAPE)), ExportFormat.FLEX))
    (options,) = json.loads(text)["kernel_options"].values()
    assert {name.removeprefix("fwd_") for name in options} <= set(FlexKernelOptions.__annotations__)


@pytest.mark.gpu
def test_flex_attention_takes_the_options(best: Best) -> None:
    _, text = only(exported_files(document(replace(best, shape=SHAPE)), ExportFormat.FLEX))
    (options,) = json.loads(text)["kernel_options"].values()
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 4, 512, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    found = torch.compile(flex_attention)(q, k, v, kernel_options=options)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("format_", [ExportFormat.VLLM, ExportFormat.FLEX])
def test_nothing_to_tell_is_said(best: Best, format_: ExportFormat) -> None:
    predicted = replace(best, shape=SHAPE, config=TILE, origin=Origin.PREDICTED)
    words = {ExportFormat.VLLM: "takes what was measured", ExportFormat.FLEX: "flash_fwd and flash_fwd_tma"}
    with pytest.raises(NothingMeasuredError, match=f"No winner of the 1 on NVIDIA H200 .*{words[format_]}"):
        exported_files(document(predicted), format_)


def test_vllm_files_of_several_versions_of_triton_name_none(best: Best) -> None:
    newer = replace(best.environment, triton="3.9.9")
    rows = (best, replace(best, shape=replace(best.shape, seqlen_k=best.shape.seqlen_k * 4), environment=newer))
    files = exported_files(
        document(*(replace(row, shape=replace(row.shape, seqlen_q=1)) for row in rows)), ExportFormat.VLLM
    )
    assert "triton_version" not in json.loads(only(files)[1])


def test_our_own_format_is_the_document_itself(best: Best) -> None:
    with pytest.raises(UsageError, match="Other formats are triton, vllm, flex"):
        exported_files(document(best), ExportFormat.JSON)
