"""Writes the tables of measured results into README.md and docs/*.md: `python -m blocktune.cli.pages.pages`.

They stand between two comment lines, the first of which names a file of results/, as `tune bench --out`, `tune ladder
--out` or `tune replay --out` writes it, and come from nothing else.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.cli.explain.ladder_file import SUFFIX as LADDER
from blocktune.cli.explain.ladder_file import ladder_tables, read_ladder
from blocktune.cli.lab.replay_file import FIT, read_replay, replay_tables
from blocktune.cli.lab.replay_file import SUFFIX as REPLAY
from blocktune.cli.pages import differential_tables, shipped_tables
from blocktune.cli.pages import gpu_test_tables as readme_gpu_runs
from blocktune.cli.pages import noise_tables as readme_noise
from blocktune.cli.pages.feature_tables import SUFFIX as FEATURES
from blocktune.cli.pages.feature_tables import feature_tables, passes_table
from blocktune.cli.pages.readme_rivals import left_out, with_todays_rivals
from blocktune.cli.shared.json_files import write_atomically
from blocktune.cli.tune.bench import geometric_mean
from blocktune.cli.tune.bench_file import read_bench
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.lab.model_fit import fit_rows
from blocktune.tuner.lab.sweep_file import load_sweep
from blocktune.tuner.lab.sweep_sources import sources_of

BLOCK = re.compile(r"<!-- results (?P<place>(?P<file>[^\s#]+)(#(?P<part>\w+))?) -->\n.*?<!-- /results -->", re.DOTALL)
NOTHING = (
    "No results are here yet: `tune bench --out results/DEVICE.bench.json` measures them, `make results` shows them."
)
NO_LOAD = (
    "No results under sustained load are here yet: those of this file do not say how the GPU worked. `tune bench "
    "--regime sustained --out results/DEVICE-sustained.bench.json` measures them, `make results` shows them."
)
NO_REPLAY = (
    "No searches of recorded sweeps are here yet: `tune replay --out results/DEVICE.replay.json` makes them, "
    "`make results` shows them."
)
NO_LADDER = "No ladder is here yet: `tune ladder --out results/DEVICE.ladder.json` climbs it, `make results` shows it."
HEADER = ("seqlen", "mask", "default", "paper rule", "stock autotune", "tuned", "cuDNN", "tuned / cuDNN")
GUESTS = {"flex": "FlexAttention", "bfloat16": "16 bits"}
LOAD = ("SM clock, MHz", "power, W")
"""Further columns under sustained load."""
FEW_QUERIES = 16
OWN_COLUMNS = (
    " A column with the name of a kernel has the best config of it that was stored, which its search may have left far "
    "from its best."
)
MASKS = {Causal.NONE: "full", Causal.UPPER_LEFT: "causal", Causal.LOWER_RIGHT: "causal, lower right"}
REGIMES = {
    "burst": "short bursts, in which the card stays cool",
    "sustained": "sustained load, without a break",
}


def results_block(document: Mapping[str, Any] | None) -> str:
    """The tables of one bench file; None: there is no such file."""
    if document is None or not document["rows"]:
        return NOTHING
    if document["regime"] == "sustained" and not all(row.get("load") for row in document["rows"]):
        return NO_LOAD
    return _section(document)


def with_results(page: str, folder: Path) -> str:
    """A page in which every block between `<!-- results FILE -->` and `<!-- /results -->` is made from folder/FILE.

    Of a replay, `FILE#strategies` is the part with this name alone.

    Raises:
        UsageError: a file is neither a bench nor what its name says.
    """

    def filled(match: re.Match[str]) -> str:
        path = folder / match["file"]
        if shipped_tables.is_shipped(path):
            block = shipped_tables.block(path)
        elif path.name.endswith(readme_noise.SUFFIXES):
            block = readme_noise.block(path)
        elif path.name.endswith(differential_tables.SUFFIX):
            block = differential_tables.block(path)
        elif path.name.endswith(readme_gpu_runs.SUFFIXES):
            block = readme_gpu_runs.block(path)
        elif path.name.endswith(LADDER):
            block = ladder_tables(read_ladder(path)) if path.exists() else NO_LADDER
        elif path.name.endswith(REPLAY):
            block = _replay(path, match["part"], folder) if path.exists() else NO_REPLAY
        elif path.name.endswith(FEATURES) and path.exists():
            document = with_todays_rivals(read_bench(path))
            block = feature_tables(document, _measured(document) + left_out(document)) if document["rows"] else NOTHING
        else:
            block = results_block(with_todays_rivals(read_bench(path)) if path.exists() else None)
        return f"<!-- results {match['place']} -->\n{block}\n<!-- /results -->"

    return BLOCK.sub(filled, page)


def _replay(path: Path, part: str | None, folder: Path) -> str:
    """Return the tables of a replay, with what its sweeps are of."""
    document = read_replay(path)
    sweeps = sorted((folder / "sweeps").glob("*.gz"))
    without = document.get("without") or ()
    fit = fit_rows(map(load_sweep, sweeps)) if part in (None, FIT) else []
    kept = [row for row in fit if row.kernel not in without]
    return replay_tables(document, part, sources_of(sweeps, without), kept)


def pages(root: Path) -> list[Path]:
    """The pages that may hold blocks: the README and the documents."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def _section(document: Mapping[str, Any]) -> str:
    rows = [_Row(row) for row in document["rows"]]
    parts = [_caption(document)]
    for dim in sorted({row.shape.head_dim for row in rows}):
        own = sorted((row for row in rows if row.shape.head_dim == dim), key=_Row.place)
        columns = _columns(own) + _guests(own)
        header = (*HEADER, *(GUESTS.get(name, name) for name in columns), *(LOAD if _is_sustained(document) else ()))
        lines = [_line(header), _line(["---:", "---"] + ["---:"] * (len(header) - 2))]
        lines += [row.line(columns, with_load=_is_sustained(document)) for row in own]
        unit = "GB/s of keys and values" if all(row.is_decoding for row in own) else "TFLOP/s"
        parts.append(f"Head dimension {dim}, {unit}:\n\n" + "\n".join(lines))
    parts.append(_means(rows))
    parts += [table] if (table := passes_table(document)) else []
    return "\n\n".join(parts)


def _columns(rows: "Sequence[_Row]") -> list[str]:
    """The kernels that get a column for their own best config: there is one in every row, not always the tuned one."""
    timed = [name for name in KERNELS if any(name in row.entries for row in rows)]
    return [name for name in timed if all(name in row.entries or row.winner == name for row in rows)]


def _guests(rows: "Sequence[_Row]") -> list[str]:
    """The peers that take part only when asked to, and were timed in some row."""
    return [name for name in GUESTS if any(row.entries.get(name, {}).get("timing") for row in rows)]


class _Row:
    """One shape of a bench, by contender."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.load: Mapping[str, Any] = row.get("load") or {}
        self.shape = AttentionShape.from_json(row["shape"])
        self.entries = {entry["name"]: entry for entry in row["contenders"]}

    @property
    def is_decoding(self) -> bool:
        """A few queries over many keys: what counts is how fast the keys are read."""
        return self.shape.seqlen_q <= FEW_QUERIES < self.shape.seqlen_k

    @property
    def winner(self) -> str | None:
        """The kernel of the tuned config."""
        return (self.entries.get("tuned", {}).get("config") or {}).get("kernel")

    def place(self) -> tuple[Any, ...]:
        shape = self.shape
        return (
            shape.seqlen_q,
            shape.batch if self.is_decoding else 0,
            shape.seqlen_k,
            list(Causal).index(shape.causal),
            shape.label,
        )

    def line(self, further: Sequence[str] = (), *, with_load: bool = False) -> str:
        """The row's cells; further: kernels, with their own best config, and guests."""
        over = (self._timing("tuned") or {}).get("over_cudnn")
        spread = f"{over['median']:.3f} ({over['low']:.3f} to {over['high']:.3f})" if over else "-"
        rates = [self._rate(name) for name in ("default", "paper", "triton_autotune", "tuned", "cudnn")]
        shape = self.shape
        length = f"{shape.seqlen_k} keys, batch {shape.batch}" if self.is_decoding else f"{shape.seqlen_q}"
        load = self._load_cells() if with_load else ()
        columns = (self._rate_of(name) for name in further)
        return _line([length, MASKS[self.shape.causal], *rates, spread, *columns, *load])

    def _load_cells(self) -> tuple[str, str]:
        """Return the clock, lowest to highest, and the mean power while the row was timed."""
        clock, power = self.load.get("sm_clock_mhz"), self.load.get("power_w")
        return "-" if clock is None else f"{clock[0]} to {clock[2]}", "-" if power is None else f"{power:.0f}"

    def _rate_of(self, kernel: str) -> str:
        """The rate of a kernel's best config, which is the tuned one where the kernel has won."""
        return self._rate("tuned" if self.winner == kernel else kernel)

    def ratio(self, rival: str) -> float | None:
        """The rival's time over that of the tuned config."""
        ours, theirs = self._timing("tuned"), self._timing(rival)
        return theirs["median_us"] / ours["median_us"] if ours and theirs else None

    def _timing(self, name: str) -> Mapping[str, Any] | None:
        timing: Mapping[str, Any] | None = self.entries.get(name, {}).get("timing")
        return timing

    def _rate(self, name: str) -> str:
        timing = self._timing(name)
        if timing is None:
            entry = self.entries.get(name, {})
            asked = entry.get("config") is not None or name != "paper"  # the rule may have no config for a shape
            return "failed" if asked and entry.get("problem") else "-"
        tuning = self.entries[name]["tuning"]
        if self.is_decoding:
            shape = self.shape
            rows = shape.batch * shape.num_heads_kv * shape.seqlen_k
            return f"{rows * (shape.head_dim + shape.head_dim_v) * shape.element_bytes / timing['median_us'] / 1e3:.0f}"
        return f"{timing['tflops']:.0f}" + (f" ({tuning['cold_seconds']:.0f} s)" if tuning else "")


def _caption(document: Mapping[str, Any]) -> str:
    return (
        f"{_measured(document)} "
        "All of a row was checked first and timed in turns in one run; the ratio is paired by round, with its 5th and "
        "95th percentile. In brackets behind stock `@triton.autotune` over the same space: the seconds that it takes "
        "to tune, estimated for an empty cache."
        + left_out(document)
        + (OWN_COLUMNS if _has_kernels(document) else "")
        + (_held(document) if _is_sustained(document) else "")
    )


def _is_sustained(document: Mapping[str, Any]) -> bool:
    return bool(document["regime"] == "sustained")


def _held(document: Mapping[str, Any]) -> str:
    """Return how many rows were timed at the power limit, by the samples that stand in them."""
    held = sum(bool(row["load"]["at_power_limit"]) for row in document["rows"])
    return (
        f" Clock and power are those of the whole measurement of a row; in {held} of {len(document['rows'])} rows the "
        "power limit held the clock down all the while."
    )


def _measured(document: Mapping[str, Any]) -> str:
    """Where, when and how."""
    environment, shape = document["environment"], AttentionShape.from_json(document["rows"][0]["shape"])
    software = ", ".join(f"{name} {environment[name]}" for name in ("triton", "torch", "cudnn", "driver"))
    commands = " and ".join(f"`{command}`" for command in document["commands"])
    configs = (entry.get("config") for row in document["rows"] for entry in row["contenders"])
    kernels = ", ".join(sorted({config["kernel"] for config in configs if config}))
    return (
        f"Measured on {document['device']['name']} on {document['created_at'][:10]} ({software}, power limit "
        f"{environment['power_limit_w']} W), kernels {kernels}, by {commands}: "
        f"{REGIMES[document['regime']]}, {shape.dtype}.{_commits(document)}"
    )


def _commits(document: Mapping[str, Any]) -> str:
    """Return the commits that the rows were measured with; nothing for files that do not name them."""
    commits = dict.fromkeys(commit[:10] for row in document["rows"] if (commit := row.get("commit")))
    return f" Commit {' and '.join(commits)}." if commits else ""


def _has_kernels(document: Mapping[str, Any]) -> bool:
    rows = [_Row(row) for row in document["rows"]]
    return any(
        _columns([row for row in rows if row.shape.head_dim == dim]) for dim in {row.shape.head_dim for row in rows}
    )


def _means(rows: Iterable[_Row]) -> str:
    lines = []
    all_rows = list(rows)
    rivals = {
        "cudnn": "cuDNN",
        "fa2": "FlashAttention-2 in PyTorch",
        "default": "the default",
        "paper": "the paper's rule",
        "triton_autotune": "stock autotune",
        **GUESTS,
    }
    for name, words in rivals.items():
        ratios = [ratio for row in all_rows if (ratio := row.ratio(name)) is not None]
        if ratios:
            lines.append(f"{geometric_mean(ratios):.3f} over {words} ({len(ratios)} shapes)")
    return f"Geometric means of the tuned config's speed: {'; '.join(lines) or 'none'}."


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Brings the pages of the working folder up to date with results/."""
    if not Path("README.md").exists():
        sys.exit("error: The command runs where README.md is, but it is not here. Change to the project's folder.")
    for path in pages(Path()):
        page = path.read_text(encoding="utf-8")
        text = with_results(page, Path("results"))
        if text != page:
            write_atomically(path, text)


if __name__ == "__main__":
    main()
