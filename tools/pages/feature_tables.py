"""Tables of results that do not compare sizes: features, and the two forms of the backward."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blocktune.cli.tune.bench import geometric_mean
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.text import counted
from blocktune.tuner.compare.report import PEERS, TUNED, out_of_the_box
from tools.pages.document_tables import markdown_table

SUFFIX = "-features.bench.json"
"""Of files whose shapes differ in what they ask for and not in size."""

HEADER = (
    "shape",
    "kernel",
    "default, µs",
    "tuned, µs",
    "tuned over default",
    "cuDNN, µs",
    "FA3, µs",
    "FA4, µs",
    "FlexAttention, µs",
    "tuned over fastest rival",
    "TFLOP/s",
    "GB/s of keys and values",
)
SHOWN = ("cudnn", "fa3", "fa4", "flex")
"""Peers with a column of their own."""

RIVALS = {
    "the default": ("default",),
    "the fastest rival": tuple(PEERS),
    "cuDNN": ("cudnn",),
    PEERS["fa3"]: ("fa3",),
    PEERS["fa4"]: ("fa4",),
    PEERS["flex"]: ("flex",),
}
"""Contenders that the tuned config's mean speed is compared with: the fastest of these, by what they are called."""

TOGETHER = " All of a row was checked first and timed in turns in one run; gains are those of median times."
SPARSE = " Operations of a block mask are those of the blocks that take part, a quarter of all."
TWO_PASSES, ONE_KERNEL = "flash_bwd_split", "flash_bwd_fused"
PASSES_HEADER = ("head dim", "seqlen", "mask", "two passes", "one kernel", "one kernel over two passes", "faster")

WORDS = ("shape", "kernel", "mask", "faster")
"""Columns that hold no numbers."""


def feature_tables(document: Mapping[str, Any], caption: str) -> str:
    """Return the rows of a bench in the order of their file, forwards first.

    Args:
        document: as `tune bench --out` writes it.
        caption: what stands above the table.
    """
    rows = [(AttentionShape.from_json(row["shape"]), _by_name(row)) for row in document["rows"]]
    sparse = any(shape.features.mask is MaskKind.BLOCK_SPARSE for shape, _ in rows)
    ordered = sorted(rows, key=lambda row: (row[0].direction.value != "forward", _key_rate(row[1]) is not None))
    return "\n\n".join(
        (
            caption + TOGETHER + (SPARSE if sparse else ""),
            _table(*_filled_columns(HEADER, [_feature_cells(*row) for row in ordered])),
            _means([row for _, row in rows]),
        )
    )


def passes_table(document: Mapping[str, Any]) -> str:
    """Return the best stored two-pass backward next to the best stored one-kernel one, in TFLOP/s; nothing unless both
    took part in a row."""
    lines, ratios = [], []
    for row in document["rows"]:
        shape, entries = AttentionShape.from_json(row["shape"]), _by_name(row)
        two, one = (_best_of(name, entries) for name in (TWO_PASSES, ONE_KERNEL))
        if two is None or one is None:
            continue
        ratios.append(two["median_us"] / one["median_us"])
        place = (shape.head_dim, shape.seqlen_q, shape.causal is not Causal.NONE, shape.label)
        lines.append((place, _passes_cells(shape, two, one, ratios[-1])))
    if not lines:
        return ""
    table = _table(PASSES_HEADER, (cells for _, cells in sorted(lines)))
    return (
        f"Two passes (`{TWO_PASSES}`) against one kernel that adds up dq (`{ONE_KERNEL}`), the best stored config of "
        "each, "
        f"TFLOP/s:\n\n{table}\n\nGeometric mean of one kernel's speed over two passes: {geometric_mean(ratios):.3f} "
        f"({counted(len(ratios), 'shape')})."
    )


def _by_name(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the contenders of a row by name, of a shape that was not tuned what its calls get as the tuned one."""
    entries = {entry["name"]: entry for entry in row["contenders"]}
    own = entries.pop(out_of_the_box(entries), None)
    return entries | ({} if own is None else {TUNED: own})


def _best_of(kernel: str, entries: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the timing of a kernel's best config, which is the tuned one where the kernel has won."""
    won = (entries.get("tuned", {}).get("config") or {}).get("kernel") == kernel
    timing: Mapping[str, Any] | None = entries.get("tuned" if won else kernel, {}).get("timing")
    return timing


def _passes_cells(
    shape: AttentionShape, two: Mapping[str, Any], one: Mapping[str, Any], ratio: float
) -> tuple[str, ...]:
    mask = {Causal.NONE: "full", Causal.UPPER_LEFT: "causal"}.get(shape.causal, "causal, lower right")
    rates = (f"{timing['tflops']:.0f}" for timing in (two, one))
    winner = "one kernel" if ratio > 1 else "two passes"
    return str(shape.head_dim), str(shape.seqlen_q), mask, *rates, f"{ratio:.3f}", winner


def _feature_cells(shape: AttentionShape, entries: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    tuned = entries.get("tuned", {})
    timing, rate = tuned.get("timing"), _key_rate(entries)
    gain = _over(["default"], entries)
    return (
        shape.label,
        (tuned.get("config") or {}).get("kernel", "-"),
        _time(entries, "default"),
        _time(entries, "tuned"),
        "-" if gain is None else f"{gain:.3f}",
        *(_time(entries, name) for name in SHOWN),
        _over_best(entries),
        "-" if timing is None else f"{timing['tflops']:.0f}",
        "-" if rate is None else f"{rate:.0f}",
    )


def _over_best(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the fastest rival's time over that of the tuned config."""
    ratio = _over(PEERS, entries)
    return "-" if ratio is None else f"{ratio:.3f}"


def _over(rivals: Iterable[str], entries: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the time of the fastest of some contenders over that of the tuned config; None where one is missing."""
    tuned = entries.get("tuned", {}).get("timing")
    times = [timing["median_us"] for name in rivals if (timing := entries.get(name, {}).get("timing"))]
    return min(times) / tuned["median_us"] if tuned and times else None


def _key_rate(entries: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return GB/s of keys and values, where there are so few queries that it counts."""
    rate: float | None = (entries.get("tuned", {}).get("timing") or {}).get("key_gbs")
    return rate


def _time(entries: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Return a time in microseconds; `failed` for a config of ours whose result was wrong or missing."""
    entry = entries.get(name, {})
    timing = entry.get("timing")
    if timing is not None:
        return f"{timing['median_us']:,.1f}"
    return "failed" if entry.get("config") is not None and entry.get("problem") else "-"


def _means(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    words = []
    for name, rivals in RIVALS.items():
        ratios = [ratio for row in rows if (ratio := _over(rivals, row)) is not None]
        words += [f"{geometric_mean(ratios):.3f} over {name} ({counted(len(ratios), 'shape')})"] if ratios else []
    return f"Geometric means of the tuned config's speed: {'; '.join(words) or 'none'}."


def _filled_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the header and the rows without the columns that have only dashes."""
    kept = [index for index in range(len(header)) if any(row[index] != "-" for row in rows)]
    return [header[index] for index in kept], [[row[index] for index in kept] for row in rows]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_table(header, rows, words=[place for place, name in enumerate(header) if name in WORDS])
