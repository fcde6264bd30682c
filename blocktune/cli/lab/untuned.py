"""`tune lab calibrate`, and `tune lab replay --untuned`: what untuned shapes get."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.lab.untuned_file import COLUMNS, untuned_document, untuned_rows
from blocktune.cli.output.json_files import read_json, writable, write_atomically
from blocktune.cli.output.render import note, print_json, print_table, say
from blocktune.cli.shared.options import AsJson, Database
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from blocktune.db.records.records import Best
    from blocktune.tuner.lab.sweep_file import Sweep
    from blocktune.tuner.lab.untuned import UntunedStudy

DEFAULT_PLACE, DENSE_PLACE = Path("results/sweeps"), Path("results/dense-sweeps")


def calibrate(
    out: Annotated[
        Path, typer.Option("--out", callback=writable, help="Where the correction is written: NAME.correction.json.")
    ],
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PLACE]...", help=f"Sweep files, or folders.  [default: {DEFAULT_PLACE} {DENSE_PLACE}]"
        ),
    ] = None,
    winners: Annotated[
        Path | None, typer.Option("--winners", help="Winners with their defaults' times, as `tune export` writes them.")
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Fit the expected times of untuned shapes to measurements.

    The file holds what recorded sweeps, winners and the trials of a named database say about other shapes, and the
    constants that predict left-out shapes best. NAME.bands.json gets the error bands of the cost model.
    `blocktune/results/DEVICE.correction.json` and `DEVICE.bands.json` ship with the package.
    Equal measurements give equal bytes.

    \b
    tune lab calibrate --winners blocktune/results/h200.json --out blocktune/results/h200.correction.json
    """
    from blocktune.runtime.selection.correction import SUFFIX, correction_document
    from blocktune.tuner.cost.bands import SUFFIX as BANDS_SUFFIX
    from blocktune.tuner.cost.bands import bands_document
    from blocktune.tuner.lab.measured_shapes import promising

    study = study_of(places or [DEFAULT_PLACE, DENSE_PLACE], winners, db)
    trust = study.fit(study.recorded)
    kept = promising(study.recorded)
    _write(out, correction_document(study.device.key, trust, kept))
    bands_out = out.with_name(out.name.removesuffix(SUFFIX) + BANDS_SUFFIX)
    _write(bands_out, bands_document(study.device.key, study.error_bands()))
    if as_json:
        facts = {"file": str(out), "bands": str(bands_out), "device": study.device.name}
        print_json(facts | {"shapes": len(kept), "bytes": out.stat().st_size})
    else:
        say(f"{out}: {len(kept)} measured shapes of {study.device.name}, {out.stat().st_size} bytes; {trust}")
        say(f"{bands_out}: error bands of the cost model")


def _write(out: Path, document: dict[str, Any]) -> None:
    write_atomically(out, json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")


def replay_untuned(places: Sequence[Path], winners: Path | None, out: Path | None, as_json: bool) -> None:
    """Score what untuned shapes get by sweeps that are left out in turn, and print or keep the result."""
    from blocktune.tuner.lab.untuned import Without

    study = study_of(places, winners, None)
    cases = {str(without): list(study.cases(without, note)) for without in Without}
    document: dict[str, Any] = untuned_document(study.device.key, cases)
    if out is not None:
        write_atomically(out, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")
    if as_json:
        print_json(document)
        return
    print_table(COLUMNS, untuned_rows(document))


def study_of(places: Sequence[Path], winners: Path | None, db: str | None) -> "UntunedStudy":
    """Return the sweeps of one device and its winners.

    Raises:
        UsageError: there are sweeps of several devices, or no sweep.
    """
    from blocktune.tuner.lab.sweep_file import load_sweep, sweep_files, sweeps_of
    from blocktune.tuner.lab.untuned import UntunedStudy

    sweeps: list[Sweep] = [load_sweep(path) for path in sweep_files(places)]
    bests = [] if winners is None else _bests(winners)
    if db is not None:
        with existing_store(db) as store:
            found = [] if store is None else [sweep for sweep in sweeps_of(store.trials()) if sweep.timed]
            bests += [] if store is None else store.bests()
        recorded = {sweep.shape for sweep in found}
        sweeps = [sweep for sweep in sweeps if sweep.shape not in recorded] + found
    devices = sorted({sweep.device.key for sweep in sweeps})
    if len(devices) != 1:
        raise UsageError(
            f"A correction is of one device, but these sweeps are of {', '.join(devices)}. Name the files of one."
        )
    return UntunedStudy(sweeps, [best for best in bests if best.device.key == devices[0]])


def _bests(path: Path) -> "list[Best]":
    from blocktune.db.exchange.importing import records_from

    return list(records_from(read_json(path))[0])
