"""Writes what is generated into README.md, docs/, notes/ and the READMEs of rooms: `python -m tools.pages.pages`, or
`make results`.

Tables of results stand between two comment lines, the first of which names a file of results/ or blocktune/results/, as
`tune bench --out`, `tune ladder --out` or `tune lab replay --out` writes it, and come from nothing else. So do
pictures: docs/**/NAME.bench.svg shows results/NAME.bench.json, docs/**/NAME.explain.svg a sweep's fastest config. The
reference of the commands comes from their help, their output from running them.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.explain.ladder_file import SUFFIX as LADDER
from blocktune.cli.explain.ladder_file import read_ladder
from blocktune.cli.lab.replay_file import SUFFIX as REPLAY
from blocktune.cli.lab.replay_file import read_replay
from blocktune.cli.lab.untuned_file import SUFFIX as UNTUNED
from blocktune.cli.output.json_files import read_json, write_atomically
from blocktune.cli.tune.bench_file import read_bench
from blocktune.kernels.files import known_hashes
from blocktune.kernels.files.reading import SOURCE_BYTES, read_text
from blocktune.runtime.selection.correction import SUFFIX as CORRECTION
from blocktune.tuner.lab.sweep_file import SUFFIX as SWEEP
from blocktune.tuner.lab.sweep_file import load_sweep, sweep_files
from tools.lab import calibration_file, transfer_file
from tools.lab.fleet_cost import FOLDER as FLEET
from tools.lab.fleet_cost import fleet_table
from tools.pages import bench_summary
from tools.pages.bench_tables import NOTHING, absent, measurement_words, results_block
from tools.pages.checks import (
    differential_tables,
    fault_tables,
    gpu_test_tables,
    sanitizer_tables,
    speed_tables,
)
from tools.pages.command_output import with_output
from tools.pages.command_reference import with_commands
from tools.pages.feature_tables import SUFFIX as FEATURES
from tools.pages.feature_tables import feature_tables
from tools.pages.pictures import explain_picture, speed_picture, start_picture
from tools.pages.readme_rivals import omissions_sentence, with_todays_rivals
from tools.pages.recorded import (
    backward_peer_tables,
    counter_tables,
    energy_tables,
    facts,
    library_tables,
    model_tables,
    noise_tables,
    plain_tables,
    shipped_tables,
    split_tables,
    ui_tables,
)
from tools.pages.recorded.places import place_of
from tools.pages.recorded.sweeps import recorded_sweep, sweeps_in
from tools.pages.room_maps import room_maps
from tools.pages.searches import block_size_tables, drawn_peer_tables
from tools.pages.searches.drawn_tables import SUFFIX as DRAWN
from tools.pages.searches.drawn_tables import drawn_block
from tools.pages.searches.ladder_tables import ladder_tables
from tools.pages.searches.model_fit import fit_rows
from tools.pages.searches.replay_tables import FIT, replay_tables
from tools.pages.searches.sweep_sources import sources_of
from tools.pages.searches.untuned_tables import read_untuned_study, untuned_tables
from tools.pages.source_hashes import hashes_text
from tools.pages.support_matrix import with_support
from tools.pages.targets import tables as target_tables

BLOCK = re.compile(r"<!-- results (?P<place>(?P<file>[^\s#]+)(#(?P<part>\w+))?) -->\n.*?<!-- /results -->", re.DOTALL)
NO_REPLAY = (
    "No searches of recorded sweeps are here yet: `tune lab replay --out results/DEVICE.replay.json` makes them, "
    "`make results` shows them."
)
NO_LADDER = (
    "No ladder is here yet: `tune ladder --out blocktune/results/DEVICE.ladder.json` climbs it, `make results` "
    "shows it."
)


def _ending(suffix: str | tuple[str, ...]) -> Callable[[Path], bool]:
    return lambda path: path.name.endswith(suffix)


def _ladder(path: Path) -> str:
    return ladder_tables(read_ladder(path)) if path.exists() else NO_LADDER


BLOCKS: tuple[tuple[Callable[[Path], bool], Callable[[Path], str]], ...] = (
    (lambda path: path.name == FLEET, lambda path: fleet_table(sweeps_in(path))),
    (counter_tables.is_counters, counter_tables.block),
    (shipped_tables.is_shipped, shipped_tables.block),
    (_ending(noise_tables.SUFFIXES), noise_tables.block),
    (_ending(fault_tables.SUFFIX), fault_tables.block),
    (_ending(differential_tables.SUFFIX), differential_tables.block),
    (_ending(speed_tables.SUFFIX), speed_tables.block),
    (_ending(energy_tables.SUFFIX), energy_tables.block),
    (_ending(library_tables.SUFFIX), library_tables.block),
    (_ending(model_tables.SUFFIX), model_tables.block),
    (_ending(gpu_test_tables.SUFFIXES), gpu_test_tables.block),
    (_ending(ui_tables.SUFFIX), ui_tables.block),
    (_ending(sanitizer_tables.SUFFIX), sanitizer_tables.block),
    (_ending(backward_peer_tables.SUFFIX), backward_peer_tables.block),
    (_ending(drawn_peer_tables.SUFFIX), drawn_peer_tables.block),
    (_ending(plain_tables.SUFFIX), plain_tables.block),
    (_ending(LADDER), _ladder),
    (_ending(CORRECTION), split_tables.block),
    (_ending(calibration_file.SUFFIX), calibration_file.block),
    (_ending(DRAWN), drawn_block),
    (_ending(SWEEP), block_size_tables.block),
    (_ending(transfer_file.SUFFIX), transfer_file.block),
    (_ending(UNTUNED), lambda path: untuned_tables(read_untuned_study(path))),
)
"""What makes the block of a file, by the first question to the file that is answered with yes; others are benches."""


def with_results(page: str, folder: Path) -> str:
    """Return a page in which every block between `<!-- results FILE -->` and `<!-- /results -->` is made from
    folder/FILE, or from a FILE that ships with the package.

    Of a replay, `FILE#strategies` is the part with this name alone; of a bench, `FILE#summary` is a table of six rows;
    `facts#NAME` holds sentences (recorded/facts.py), `targets#NAME` the tables of a topic (targets/tables.py).

    Raises:
        UsageError: a file is neither a bench nor what its name says.
    """

    def filled(match: re.Match[str]) -> str:
        if match["file"] == facts.FILE:
            return f"<!-- results {match['place']} -->\n{facts.fact(match['part'], folder)}\n<!-- /results -->"
        if match["file"] == target_tables.FILE:
            return f"<!-- results {match['place']} -->\n{target_tables.block(match['part'], folder)}\n<!-- /results -->"
        path = place_of(match["file"], folder)
        block = next((of_file(path) for is_of, of_file in BLOCKS if is_of(path)), None)
        if block is None and path.name.endswith(REPLAY):
            block = _replay(path, match["part"], folder) if path.exists() else NO_REPLAY
        if block is None:
            block = _bench(path, match["part"])
        return f"<!-- results {match['place']} -->\n{block}\n<!-- /results -->"

    return BLOCK.sub(filled, page)


def _bench(path: Path, part: str | None) -> str:
    """Return the tables of a bench."""
    if not path.exists():
        return NOTHING
    document = with_todays_rivals(read_bench(path))
    if not path.name.endswith(FEATURES):
        return (bench_summary.summary if part == bench_summary.PART else results_block)(document)
    if not document["rows"]:
        return NOTHING
    return feature_tables(document, absent(document) + measurement_words(document) + omissions_sentence(document))


def _replay(path: Path, part: str | None, folder: Path) -> str:
    """Return the tables of a replay, with what its sweeps are of."""
    document = read_replay(path)
    sweeps = _replayed_sweeps(document, folder)
    without = document.get("without") or ()
    fit = fit_rows(map(recorded_sweep, sweeps)) if part in (None, FIT) else []
    kept = [row for row in fit if row.kernel not in without]
    return replay_tables(document, part, sources_of(sweeps, without), kept)


def _replayed_sweeps(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Return the recorded sweeps that a replay is of: those that hold every config, and where it has more, the dense
    ones too."""
    complete = sweep_files([folder / "sweeps"])
    return (
        complete
        if len(document["sweeps"]) <= len(complete)
        else sweep_files([folder / "sweeps", folder / "dense-sweeps"])
    )


def pages(root: Path) -> list[Path]:
    """Return the pages that may hold blocks: the README, the documents and the notes."""
    return [root / "README.md", *(path for name in ("docs", "notes") for path in sorted((root / name).rglob("*.md")))]


def pictures(root: Path) -> dict[Path, Path]:
    """Return the file of results that each picture of the documents shows, by the picture."""
    speeds = sorted((root / "docs").rglob(f"*{speed_picture.SUFFIX}"))
    reasons = sorted((root / "docs").rglob(f"*{explain_picture.SUFFIX}"))
    starts = sorted((root / "docs").rglob(f"*{start_picture.SUFFIX}"))
    sweeps = root / "results" / "sweeps"
    return {path: root / "results" / path.with_suffix(".json").name for path in speeds + starts} | {
        path: sweeps / (path.name.removesuffix(explain_picture.SUFFIX) + SWEEP) for path in reasons
    }


def draw_picture(results: Path) -> str:
    """Return the picture of a file of results.

    Raises:
        UsageError: the file is no bench, no sweep and no record of libraries.
    """
    if results.name.endswith(SWEEP):
        return explain_picture.explain_picture(load_sweep(results))
    if results.name.endswith(library_tables.SUFFIX):
        return start_picture.start_picture(read_json(results))
    return speed_picture.speed_picture(with_todays_rivals(read_bench(results)))


def main() -> None:
    """Bring the pages and pictures of the working folder up to date with results/ and the commands."""
    if not Path("README.md").exists():
        sys.exit("error: The command runs where README.md is, but it is not here. Change to the project's folder.")
    for path in pages(Path()):
        page = read_text(path, SOURCE_BYTES)
        _write(path, with_output(with_commands(with_support(with_results(page, Path("results")), Path("results")))))
    for path, results in pictures(Path()).items():
        _write(path, draw_picture(results))
    for path, text in room_maps(Path()):
        _write(path, text)
    _write(known_hashes.FILE, hashes_text())


def _write(path: Path, text: str) -> None:
    """Write a file unless it has this text."""
    if not path.exists() or read_text(path, SOURCE_BYTES) != text:
        write_atomically(path, text)


if __name__ == "__main__":
    main()
