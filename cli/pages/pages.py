"""Writes what is generated into README.md and docs/: `python -m blocktune.cli.pages.pages`, or `make results`.

Tables of results stand between two comment lines, the first of which names a file of results/, as `tune bench --out`,
`tune ladder --out` or `tune replay --out` writes it, and come from nothing else. So do pictures: docs/**/NAME.bench.svg
shows results/NAME.bench.json. The reference of the commands comes from their help, their output from running them.
"""

import re
import sys
from pathlib import Path

from blocktune.cli.explain.ladder_file import SUFFIX as LADDER
from blocktune.cli.explain.ladder_file import ladder_tables, read_ladder
from blocktune.cli.lab.fleet_cost import FOLDER as FLEET
from blocktune.cli.lab.fleet_cost import fleet_table
from blocktune.cli.lab.replay_file import FIT, read_replay, replay_tables
from blocktune.cli.lab.replay_file import SUFFIX as REPLAY
from blocktune.cli.lab.untuned_file import SUFFIX as UNTUNED
from blocktune.cli.lab.untuned_file import read_untuned, untuned_tables
from blocktune.cli.pages import (
    bench_summary,
    differential_tables,
    fault_tables,
    gpu_test_tables,
    noise_tables,
    shipped_tables,
    speed_picture,
    split_tables,
)
from blocktune.cli.pages.bench_tables import NOTHING, measured, results_block
from blocktune.cli.pages.command_output import with_output
from blocktune.cli.pages.command_reference import with_commands
from blocktune.cli.pages.feature_tables import SUFFIX as FEATURES
from blocktune.cli.pages.feature_tables import feature_tables
from blocktune.cli.pages.readme_rivals import left_out, with_todays_rivals
from blocktune.cli.shared.json_files import write_atomically
from blocktune.cli.tune.bench_file import read_bench
from blocktune.kernels.selection.correction import SUFFIX as CORRECTION
from blocktune.tuner.lab.model_fit import fit_rows
from blocktune.tuner.lab.sweep_file import load_sweep
from blocktune.tuner.lab.sweep_sources import sources_of

BLOCK = re.compile(r"<!-- results (?P<place>(?P<file>[^\s#]+)(#(?P<part>\w+))?) -->\n.*?<!-- /results -->", re.DOTALL)
NO_REPLAY = (
    "No searches of recorded sweeps are here yet: `tune replay --out results/DEVICE.replay.json` makes them, "
    "`make results` shows them."
)
NO_LADDER = "No ladder is here yet: `tune ladder --out results/DEVICE.ladder.json` climbs it, `make results` shows it."


def with_results(page: str, folder: Path) -> str:
    """Return a page in which every block between `<!-- results FILE -->` and `<!-- /results -->` is made from
    folder/FILE.

    Of a replay, `FILE#strategies` is the part with this name alone; of a bench, `FILE#summary` is a table of six rows.

    Raises:
        UsageError: a file is neither a bench nor what its name says.
    """

    def filled(match: re.Match[str]) -> str:
        path = folder / match["file"]
        if path.name == FLEET:
            block = fleet_table(path)
        elif shipped_tables.is_shipped(path):
            block = shipped_tables.block(path)
        elif path.name.endswith(noise_tables.SUFFIXES):
            block = noise_tables.block(path)
        elif path.name.endswith(fault_tables.SUFFIX):
            block = fault_tables.block(path)
        elif path.name.endswith(differential_tables.SUFFIX):
            block = differential_tables.block(path)
        elif path.name.endswith(gpu_test_tables.SUFFIXES):
            block = gpu_test_tables.block(path)
        elif path.name.endswith(LADDER):
            block = ladder_tables(read_ladder(path)) if path.exists() else NO_LADDER
        elif path.name.endswith(CORRECTION):
            block = split_tables.block(path)
        elif path.name.endswith(UNTUNED):
            block = untuned_tables(read_untuned(path))
        elif path.name.endswith(REPLAY):
            block = _replay(path, match["part"], folder) if path.exists() else NO_REPLAY
        elif path.name.endswith(FEATURES) and path.exists():
            document = with_todays_rivals(read_bench(path))
            block = feature_tables(document, measured(document) + left_out(document)) if document["rows"] else NOTHING
        else:
            block_of = bench_summary.summary if match["part"] == bench_summary.PART else results_block
            block = block_of(with_todays_rivals(read_bench(path)) if path.exists() else None)
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
    """Return the pages that may hold blocks: the README and the documents."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def pictures(root: Path) -> dict[Path, Path]:
    """Return the file of results that each picture of the documents shows, by the picture."""
    drawn = sorted((root / "docs").rglob(f"*{speed_picture.SUFFIX}"))
    return {path: root / "results" / path.with_suffix(".json").name for path in drawn}


def drawn(results: Path) -> str:
    """Return the picture of a file of results.

    Raises:
        UsageError: the file is no bench.
    """
    return speed_picture.speed_picture(with_todays_rivals(read_bench(results)))


def main() -> None:
    """Bring the pages and pictures of the working folder up to date with results/ and the commands."""
    if not Path("README.md").exists():
        sys.exit("error: The command runs where README.md is, but it is not here. Change to the project's folder.")
    for path in pages(Path()):
        page = path.read_text(encoding="utf-8")
        _write(path, with_output(with_commands(with_results(page, Path("results")))))
    for path, results in pictures(Path()).items():
        _write(path, drawn(results))


def _write(path: Path, text: str) -> None:
    """Replace a file whose text has changed."""
    if path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


if __name__ == "__main__":
    main()
