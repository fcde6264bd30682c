"""The kernels that serve each call on each GPU: the block `<!-- support -->`, computed from the kernels and the
records. `<!-- support directions -->` has more kinds of calls, each forward and with gradients."""

import re
from collections.abc import Iterator
from pathlib import Path

from blocktune.cli.output.json_files import read_json
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.shape import SHORT_DTYPES, AttentionShape
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tools.pages.document_tables import markdown_table
from tools.pages.recorded.places import place_of

BLOCK = re.compile(r"<!-- support(?P<directions> directions)? -->\n.*?<!-- /support -->", re.DOTALL)

GPUS = {
    "H100, H200": ("h200", "h100_sxm5"),
    "A100, L40S, RTX 4090, RTX 5090, B200": ("a100_sxm4_80", "l40s", "rtx4090", "rtx5090", "b200"),
    "T4": ("t4",),
}
"""Columns: kinds of GPU that have the same kernels, by names of the catalogue."""

CALLS: dict[str, dict[str, str]] = {
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "fp8": {"dtype": "float8_e4m3fn"},
    "gradients, bf16": {"direction": "backward"},
    "window": {"features": "window=1023:0"},
    "mask": {"features": "boolean"},
    "dropout": {"features": "dropout"},
    "packed": {"features": "varlen"},
    "cache": {"features": "cached"},
}
"""Rows: kinds of calls, by what differs from a plain forward in bfloat16."""

GRADIENTS = {"direction": "backward"}
OTHER_CALLS: dict[str, dict[str, str]] = {
    "soft cap": {"features": "softcap"},
    "ALiBi": {"features": "alibi"},
    "additive mask": {"features": "additive"},
    "block mask": {"features": "block_sparse"},
    "paged cache": {"features": "cached page=16"},
    "e4m3 cache": {"features": "cached kv=e4m3"},
    "draft tree": {"features": "cached tree"},
}
"""Rows of the table with directions, after those of `CALLS`."""

HEAD_DIMS = range(8, 513, 8)
MEASURED, COMPILED, PYTORCH, NONE = "measured", "compiled", "PyTorch", "none"


def with_support(page: str, folder: Path) -> str:
    """Return a page in which every block is its matrix."""

    def block(match: re.Match[str]) -> str:
        table = direction_matrix(folder) if match["directions"] else support_matrix(folder)
        return f"<!-- support{match['directions'] or ''} -->\n{table}\n<!-- /support -->"

    return BLOCK.sub(block, page)


def support_matrix(folder: Path) -> str:
    """Return one row for each kind of call: who computes it on which GPU, and up to which head_dim."""
    seen = set(_measured(folder))
    rows = [[name, *(_cell(call, gpus, seen) for gpus in GPUS.values())] for name, call in CALLS.items()]
    return markdown_table(("call", *GPUS), rows, words=range(len(GPUS) + 1))


def direction_matrix(folder: Path) -> str:
    """Return a row for the kinds of calls that are served alike; each kind of GPU has a column for the forward and one
    for gradients."""
    seen = set(_measured(folder))
    calls = {name: call for name, call in (CALLS | OTHER_CALLS).items() if "direction" not in call}
    names: dict[tuple[str, ...], list[str]] = {}
    for name, call in calls.items():
        cells = (_cell(call | way, gpus, seen) for gpus in GPUS.values() for way in ({}, GRADIENTS))
        names.setdefault(tuple(cells), []).append(name)
    rows = [[", ".join(alike), *cells] for cells, alike in names.items()]
    header = [word for gpus in GPUS for word in (gpus, "gradients")]
    return markdown_table(("call", *header), rows, words=range(len(header) + 1))


def _cell(call: dict[str, str], gpus: tuple[str, ...], seen: set[tuple[str, str, str, str]]) -> str:
    """Return how every GPU of a column serves a kind of call, and for which head dimensions."""
    devices = [device_named(gpu) for gpu in gpus]
    able = [dim for dim in HEAD_DIMS if all(kernels_for(_shape(call, dim), device.limits) for device in devices)]
    if not able:
        return NONE if _is_cached(call) and call.items() >= GRADIENTS.items() else PYTORCH
    measured = any((device.name, *_kind(_shape(call, 64))) in seen for device in devices)
    return f"{MEASURED if measured else COMPILED}, {able[0]} to {able[-1]}"


def _shape(call: dict[str, str], head_dim: int) -> AttentionShape:
    """Return a shape of a kind of call; calls over a cache have one query."""
    plain = complete_shape(1 if _is_cached(call) else 2048, head_dim, seq_k=2048).to_json()
    return AttentionShape.from_json(plain | call)


def _is_cached(call: dict[str, str]) -> bool:
    return "cached" in call.get("features", "")


def _measured(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield device and kind of everything that was measured: shipped winners and the rows of benches."""
    for path in (place_of("h200.json", folder), place_of("h100.json", folder), *sorted(folder.glob("*.bench.json"))):
        document = read_json(path)
        for row in document.get("bests") or document["rows"]:
            yield document["device"]["name"], *_kind(AttentionShape.from_json(row["shape"]))


def _kind(shape: AttentionShape) -> tuple[str, str, str]:
    """Return what decides about the row of a shape: data type, direction and the names of its features."""
    return SHORT_DTYPES[shape.dtype], str(shape.direction), " ".join(sorted(shape.features.names))
