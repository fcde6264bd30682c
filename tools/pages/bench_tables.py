"""The tables of a bench: one per head dimension, with one row per shape, and the means over all shapes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blocktune.cli.output.missing_peers import sentence_without
from blocktune.cli.tune.bench import geometric_mean
from blocktune.cli.tune.bench_file import software
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.text import counted
from blocktune.tuner.compare.report import PEERS, UNTUNED, fastest_peer, out_of_the_box
from tools.pages.document_tables import commit_sentence, markdown_table
from tools.pages.feature_tables import passes_table
from tools.pages.readme_rivals import omissions_sentence

NOTHING = (
    "No results are here yet: `tune bench --out results/DEVICE.bench.json` measures them, `make results` shows them."
)
NO_LOAD = (
    "No results under sustained load are here yet: those of this file do not say how the GPU worked. `tune bench "
    "--regime sustained --out results/DEVICE-sustained.bench.json` measures them, `make results` shows them."
)
HEADER = ("seqlen", "mask", "default", "FA heuristic", "stock autotune", "tuned", "cuDNN", "tuned / fastest rival")
GUESTS = {"fa3": "FA3", "fa4": "FA4", "flex": PEERS["flex"], "bfloat16": "16 bits"}
"""Contenders that take part where they are installed, or on request."""

BEST = "best"
RIVALS = {
    BEST: "the fastest rival",
    **PEERS,
    "default": "the default",
    "paper": "FlashAttention's heuristic",
    "triton_autotune": "stock autotune",
    "bfloat16": GUESTS["bfloat16"],
}
"""Contenders that the tuned config's mean speed is compared with."""

LOAD = ("SM clock, MHz", "power, W")
"""Further columns under sustained load."""
FEW_QUERIES = 16
OWN_COLUMNS = (
    " A column with the name of a kernel has the best config of it that was stored, which its search may have left far "
    "from its best."
)
MASKS = {Causal.NONE: "full", Causal.UPPER_LEFT: "causal", Causal.LOWER_RIGHT: "causal, lower right"}
REGIMES = {
    "burst": "short bursts (no thermal throttling)",
    "sustained": "sustained load, without a break",
}


def results_block(document: Mapping[str, Any] | None) -> str:
    """Return the tables of one bench file; None: there is no such file."""
    if document is None or not document["rows"]:
        return NOTHING
    if document["regime"] == "sustained" and not all(row.get("load") for row in document["rows"]):
        return NO_LOAD
    return _section(document)


def _section(document: Mapping[str, Any]) -> str:
    rows = [BenchRow(row) for row in document["rows"]]
    parts = [_caption(document)]
    for dim in sorted({row.shape.head_dim for row in rows}):
        own = sorted((row for row in rows if row.shape.head_dim == dim), key=BenchRow.place)
        columns = _columns(own) + _guests(own)
        header = (*HEADER, *(GUESTS.get(name, name) for name in columns), *(LOAD if _is_sustained(document) else ()))
        cells = (row.cells(columns, with_load=_is_sustained(document)) for row in own)
        unit = "GB/s of keys and values" if all(row.is_decoding for row in own) else "TFLOP/s"
        parts.append(f"Head dimension {dim}, {unit}:\n\n{markdown_table(header, cells, words=(1,))}")
    parts.append(means(rows))
    parts += [table] if (table := passes_table(document)) else []
    return "\n\n".join(parts)


def _columns(rows: "Sequence[BenchRow]") -> list[str]:
    """Return the kernels that get a column for their own best config: there is one in every row, not always the tuned
    one."""
    timed = [name for name in KERNELS if any(name in row.entries for row in rows)]
    return [name for name in timed if all(name in row.entries or row.winner == name for row in rows)]


def _guests(rows: "Sequence[BenchRow]") -> list[str]:
    """Return those of `GUESTS` that were timed in some row."""
    return [name for name in GUESTS if any(row.entries.get(name, {}).get("timing") for row in rows)]


class BenchRow:
    """One shape of a bench, by contender."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.load: Mapping[str, Any] = row.get("load") or {}
        self.shape = AttentionShape.from_json(row["shape"])
        self.entries = {entry["name"]: entry for entry in row["contenders"]}
        self.own = out_of_the_box(self.entries)

    @property
    def is_decoding(self) -> bool:
        """A few queries over many keys: what counts is how fast the keys are read."""
        return self.shape.seqlen_q <= FEW_QUERIES < self.shape.seqlen_k

    @property
    def winner(self) -> str | None:
        """The kernel of the tuned config, or of what an untuned call gets."""
        return (self.entries.get(self.own, {}).get("config") or {}).get("kernel")

    def place(self) -> tuple[Any, ...]:
        shape = self.shape
        return (
            shape.seqlen_q,
            shape.batch if self.is_decoding else 0,
            shape.seqlen_k,
            list(Causal).index(shape.causal),
            shape.label,
        )

    def cells(self, further: Sequence[str] = (), *, with_load: bool = False) -> list[str]:
        """Return the row's cells; further: kernels, with their own best config, and guests."""
        rates = [self.rate(name) for name in ("default", "paper", "triton_autotune", self.own, "cudnn")]
        shape = self.shape
        length = f"{shape.seqlen_k} keys, batch {shape.batch}" if self.is_decoding else f"{shape.seqlen_q}"
        load = self._load_cells() if with_load else ()
        columns = (self._rate_of(name) for name in further)
        return [length, MASKS[self.shape.causal], *rates, self.over_best, *columns, *load]

    @property
    def best_peer(self) -> str | None:
        """The name of the fastest rival; None where none was timed."""
        return fastest_peer({name: timing["median_us"] for name in PEERS if (timing := self.timing(name))})

    @property
    def over_best(self) -> str:
        """The tuned config's speed over the fastest rival's, with its 5th and 95th percentile where rounds were paired
        with that peer, and the peer."""
        name, ratio = self.best_peer, self.ratio(BEST)
        if name is None or ratio is None:
            return "-"
        own = self.timing(self.own) or {}
        over = own.get("over_best") or (own.get("over_cudnn") if name == "cudnn" else None)
        interval = f"{over['median']:.3f} ({over['low']:.3f} to {over['high']:.3f})" if over else f"{ratio:.3f}"
        return f"{interval}, {GUESTS.get(name, PEERS[name])}"

    def _load_cells(self) -> tuple[str, str]:
        """Return the clock, lowest to highest, and the mean power while the row was timed."""
        clock, power = self.load.get("sm_clock_mhz"), self.load.get("power_w")
        return "-" if clock is None else f"{clock[0]} to {clock[2]}", "-" if power is None else f"{power:.0f}"

    def _rate_of(self, kernel: str) -> str:
        """Return the rate of a kernel's best config, which is the tuned one where the kernel has won."""
        return self.rate(self.own if self.winner == kernel else kernel)

    def ratio(self, rival: str) -> float | None:
        """Return the rival's time over that of the tuned config."""
        ours, theirs = self.timing(self.own), self.timing(rival)
        return theirs["median_us"] / ours["median_us"] if ours and theirs else None

    def timing(self, name: str) -> Mapping[str, Any] | None:
        """Return the times of a contender or of the fastest rival; None where it did not take part or failed."""
        if name == BEST:
            return None if self.best_peer is None else self.timing(self.best_peer)
        timing: Mapping[str, Any] | None = self.entries.get(name, {}).get("timing")
        return timing

    def rate(self, name: str) -> str:
        """Return TFLOP/s of a contender, of decoding GB/s; `failed` for a config of ours without a result."""
        timing = self.timing(name)
        if timing is None:
            entry = self.entries.get(name, {})
            asked = entry.get("config") is not None or name != "paper"  # the rule may have no config for a shape
            return "failed" if asked and entry.get("problem") else "-"
        tuning = self.entries[name]["tuning"]
        if self.is_decoding:
            shape = self.shape
            rows = shape.batch * shape.num_heads_kv * shape.seqlen_k
            return f"{rows * (shape.head_dim + shape.head_dim_v) * shape.kv_bytes / timing['median_us'] / 1e3:.0f}"
        return f"{timing['tflops']:.0f}" + (f" ({tuning['cold_seconds']:.0f} s)" if tuning else "")


def _caption(document: Mapping[str, Any]) -> str:
    return (
        f"{absent(document)}{measurement_words(document)} "
        "All of a row was checked first and timed in turns in one run; the ratio is paired by round, with its 5th and "
        "95th percentile, and names the fastest rival. In brackets after stock `@triton.autotune` over the same space: "
        "the seconds that it takes to tune, estimated for an empty cache."
        + omissions_sentence(document)
        + (OWN_COLUMNS if _has_kernels(document) else "")
        + (_count_held(document) if _is_sustained(document) else "")
    )


def _is_sustained(document: Mapping[str, Any]) -> bool:
    return bool(document["regime"] == "sustained")


def _count_held(document: Mapping[str, Any]) -> str:
    """Return how many rows were timed at the power limit, by the samples that stand in them."""
    held = sum(bool(row["load"]["at_power_limit"]) for row in document["rows"])
    return (
        f" Clock and power are those of the whole measurement of a row; in {held} of {len(document['rows'])} rows the "
        "power limit held the clock down all the while."
    )


def absent(document: Mapping[str, Any]) -> str:
    """Return a sentence that names the peers that no row has; empty where none is missing."""
    timed = {entry["name"] for row in document["rows"] for entry in row["contenders"] if entry["timing"]}
    return sentence_without(timed)


def measurement_words(document: Mapping[str, Any]) -> str:
    """Return where, when and how a bench was measured."""
    shape = AttentionShape.from_json(document["rows"][0]["shape"])
    commands = " and ".join(f"`{command}`" for command in document["commands"])
    configs = (entry.get("config") for row in document["rows"] for entry in row["contenders"])
    kernels = ", ".join(sorted({config["kernel"] for config in configs if config}))
    commits = commit_sentence(row.get("commit") for row in document["rows"])
    return (
        f"Measured on {document['device']['name']} on {document['created_at'][:10]} ({software(document)}, power limit "
        f"{document['environment']['power_limit_w']} W), kernels {kernels}, by {commands}: "
        f"{REGIMES[document['regime']]}, {shape.dtype}.{commits}{_untuned_sentence(document)}"
    )


def _untuned_sentence(document: Mapping[str, Any]) -> str:
    """Return a sentence about the rows whose shapes were not tuned; empty without such."""
    names = [[entry["name"] for entry in row["contenders"]] for row in document["rows"]]
    count = sum(UNTUNED in own for own in names)
    if not count:
        return ""
    rows = "The shapes were" if count == len(names) else f"{count} of the {len(names)} shapes were"
    return f" {rows} not tuned: `tuned` is what their calls get all the same."


def _has_kernels(document: Mapping[str, Any]) -> bool:
    rows = [BenchRow(row) for row in document["rows"]]
    return any(
        _columns([row for row in rows if row.shape.head_dim == dim]) for dim in {row.shape.head_dim for row in rows}
    )


def means(rows: Iterable[BenchRow], rivals: Mapping[str, str] = RIVALS) -> str:
    """Return the geometric means of the tuned config's speed over that of rivals."""
    lines = []
    all_rows = list(rows)
    for name, words in rivals.items():
        ratios = [ratio for row in all_rows if (ratio := row.ratio(name)) is not None]
        if ratios:
            lines.append(f"{geometric_mean(ratios):.3f} over {words} ({counted(len(ratios), 'shape')})")
    return f"Geometric means of the tuned config's speed: {'; '.join(lines) or 'none'}."
