"""Winners in the formats of others: `triton.Config`, the JSON files of vLLM, and FlexAttention's `kernel_options`.

All are made from an export document (db/exchange/document.py) that is checked as if a stranger had written it, since
Python text is among what comes out. None can be imported again: they drop the environment and what was compared.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from blocktune.db.exchange.document import Document
from blocktune.db.exchange.importing import records_in
from blocktune.db.exchange.triton_module import TritonEntry, triton_module
from blocktune.db.records.records import AnyBest, Best, Outcome, Trial, of_attention
from blocktune.kernels.files.file_path import short_stem
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError
from blocktune.kernels.values.features import NO_FEATURES
from blocktune.kernels.values.shape import AttentionShape, Direction

FLEX_MASK_BLOCK = 128
"""Queries and keys of a block of FlexAttention's own masks, unless they say otherwise; tiles must divide it."""

Files = dict[str, str]
"""Text by file name."""


class ExportFormat(StrEnum):
    """A format of `tune export`.

    `JSON` is our own format; it and `OPTUNA`, a storage of studies, can be imported. `CSV` and `PARQUET` are tables,
    `KERNEL_TUNER` and `T4` files of Kernel Tuner, `TRACE` the searches over time for Perfetto and Chrome.
    """

    JSON = "json"
    TRITON = "triton"
    VLLM = "vllm"
    FLEX = "flex"
    OPTUNA = "optuna"
    CSV = "csv"
    PARQUET = "parquet"
    KERNEL_TUNER = "kernel-tuner"
    T4 = "t4"
    TRACE = "trace"


OF_TRIALS = (
    ExportFormat.OPTUNA,
    ExportFormat.CSV,
    ExportFormat.PARQUET,
    ExportFormat.KERNEL_TUNER,
    ExportFormat.T4,
    ExportFormat.TRACE,
)
"""Formats of trials, not of winners."""


def exported_files(document: Document, format_: ExportFormat) -> Files:
    """Return an export document in the format of others: one file for `TRITON` and `FLEX`, some for `VLLM`.

    Args:
        document: the winners of a device, and for `FLEX` the trials. `TRITON` takes those of all kernels, the others
            are for attention.
        format_: a file of others.

    Raises:
        UsageError: the format is our own.
        NothingMeasuredError: the document holds no winner that the format can tell.
        ImportRejectedError: the document is not in order.
    """
    winners, tried = records_in(document)
    bests, trials = of_attention(winners), of_attention(tried)
    device = DeviceSpec.from_json(document["device"])
    writers: dict[ExportFormat, Callable[[], Files]] = {
        ExportFormat.TRITON: lambda: triton_configs(device, winners),
        ExportFormat.VLLM: lambda: vllm_files(device, bests),
        ExportFormat.FLEX: lambda: flex_options(device, bests, trials),
    }
    if format_ not in writers:
        raise UsageError(
            f"No such format: {format_}. Other formats are {', '.join(writers)}; or write the document itself."
        )
    files = writers[format_]()
    if not files:
        raise NothingMeasuredError(
            f"No winner of the {len(winners)} on {device.name} can be written: `--format {format_}` takes "
            f"{_scope(format_)}. `--format triton` takes every winner."
        )
    return files


def _scope(format_: ExportFormat) -> str:
    """Return what a format takes."""
    if format_ is ExportFormat.TRITON:
        return "any winner"
    if format_ is ExportFormat.VLLM:
        return "what was measured, and nothing borrowed or predicted"
    names = sorted(flex_kernels())
    return (
        f"measured forwards without features of {' and '.join(names)}, which do as FlexAttention's template does, with "
        f"blocks that divide {FLEX_MASK_BLOCK} (trials count, too: `tune run --kernel {names[0]}` makes some)"
    )


def flex_kernels() -> Mapping[str, Mapping[str, bool]]:
    """Return the options that make FlexAttention's template compute as a kernel does, by the kernel's name."""
    from blocktune.kernels.registry import KERNELS  # imports triton

    return {name: kernel.flex_options for name, kernel in KERNELS.items() if kernel.flex_options is not None}


def triton_configs(device: DeviceSpec, bests: Iterable[AnyBest]) -> Files:
    """Return a Python module with a dictionary CONFIGS: `triton.Config` by (kernel, shape), or by (function, arguments)
    for tuned functions. Every winner is in it, with what it is worth in a comment."""
    entries = [TritonEntry.of(best) for best in bests]
    return {f"{_plain(device.name)}.py": triton_module(device.name, entries)} if entries else {}


def vllm_files(device: DeviceSpec, bests: Iterable[Best]) -> Files:
    """Return JSON files as vLLM keeps them for its fused experts: the name holds what is fixed, device_name last; the
    keys are lengths (seqlen_k), of which a reader takes the nearest one.

    Only what was measured is in them, since they cannot say where a config comes from. Of winners that differ in the
    batch alone the largest one stays. `triton_version` is there where all of a file were measured with one version.
    """
    tables: dict[str, dict[int, Best]] = {}
    for best in sorted(bests, key=lambda best: best.shape.batch):
        if best.origin is Origin.MEASURED:
            tables.setdefault(_vllm_name(best), {})[best.shape.seqlen_k] = best
    return {name: _json(_vllm_table(table)) for name, table in sorted(tables.items())}


def _vllm_table(table: Mapping[int, Best]) -> dict[str | int, Any]:
    versions = {best.environment.triton for best in table.values()}
    head: dict[str | int, Any] = {"triton_version": versions.pop()} if len(versions) == 1 else {}
    return head | {length: _vllm_config(table[length].config) for length in sorted(table)}


def flex_options(device: DeviceSpec, bests: Iterable[Best], trials: Iterable[Trial]) -> Files:
    """Return `kernel_options` of FlexAttention by shape: the fastest measured config of a kernel like its template.

    A winner of a kernel unlike it (warp specialised, say) says nothing about the template, so the trials are searched
    too. Backward and decoding have other templates, and features are the caller's score_mod: neither is in the file.
    """
    options = {
        shape.label: flex_option(config)
        for shape, config in _fastest(bests, trials).items()
        if shape.direction is Direction.FORWARD and shape.features == NO_FEATURES
    }
    if not options:
        return {}
    return {f"{short_stem(_plain(device.name))}.flex.json": _json({"device": device.name, "kernel_options": options})}


def flex_option(config: KernelConfig) -> dict[str, int | bool]:
    """Return the options that give FlexAttention's forward this config; the backward keeps its own."""
    tile: dict[str, int | bool] = {
        "fwd_BLOCK_M": config.block_m,
        "fwd_BLOCK_N": config.block_n,
        "fwd_num_warps": config.num_warps,
        "fwd_num_stages": config.num_stages,
    }
    return tile | dict(flex_kernels()[config.kernel])


def _fastest(bests: Iterable[Best], trials: Iterable[Trial]) -> dict[AttentionShape, KernelConfig]:
    """Return by shape the fastest config that FlexAttention can take, as far as times were taken on the device."""
    measured = [best for best in bests if best.origin is Origin.MEASURED]
    timed: list[Best | Trial] = [*measured, *(trial for trial in trials if trial.outcome is Outcome.OK)]
    found: dict[AttentionShape, Best | Trial] = {}
    able = flex_kernels()
    for record in timed:
        config, before = record.config, found.get(record.shape)
        if config.kernel not in able or FLEX_MASK_BLOCK % config.block_m or FLEX_MASK_BLOCK % config.block_n:
            continue
        if before is None or (record.time_us or 0.0) < (before.time_us or 0.0):
            found[record.shape] = record
    return {shape: record.config for shape, record in found.items()}


def _vllm_config(config: KernelConfig) -> dict[str, int]:
    own = {name.upper(): value for name, value in config.extra}
    tile = {"BLOCK_SIZE_M": config.block_m, "BLOCK_SIZE_N": config.block_n}
    return tile | own | {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _vllm_name(best: Best) -> str:
    shape = best.shape
    fixed = {
        "kernel": best.config.kernel,
        "heads": shape.num_heads,
        "heads_kv": shape.num_heads_kv,
        "head_dim": shape.head_dim,
        "head_dim_v": shape.head_dim_v,
        "queries": "" if shape.seqlen_q == shape.seqlen_k else shape.seqlen_q,
        "causal": shape.causal,
        "features": _plain(shape.features.label),
        "dtype": shape.dtype,
        "device_name": _plain(best.device.name),
    }
    return short_stem(",".join(f"{name}={value}" for name, value in fixed.items() if value != "")) + ".json"


def _plain(text: str) -> str:
    """Return the text as a part of a file's name: `NVIDIA H200` is `NVIDIA_H200`, as vLLM writes it."""
    return re.sub(r"[^A-Za-z0-9-]+", "_", text)


def _json(content: object) -> str:
    return json.dumps(content, indent=4, allow_nan=False) + "\n"
