"""The store: what was measured, kept the moment it was measured."""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, TypeVar

from blocktune.db.exchange.document import Document, export_document
from blocktune.db.exchange.importing import records_in
from blocktune.db.exchange.merging import ImportCounts, Results, distrust_results, merge_into
from blocktune.db.records.bulk_writer import BulkWriter
from blocktune.db.records.correction import BitCorrection, correct
from blocktune.db.records.health import StoreHealth, health_of, warn_of_damage
from blocktune.db.records.records import AnyBest, AnyTrial
from blocktune.db.rivals import with_todays_rivals
from blocktune.db.stored_records import StoredRecords
from blocktune.db.tables.backups import back_up
from blocktune.db.tables.cleaning import CleanCounts, Rules, clean
from blocktune.db.tables.sqlite_file import connect_sqlite
from blocktune.db.tables.store_errors import translate_errors
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.store_reader.places import default_store_path

__all__ = ["ResultStore", "default_store_path"]

T = TypeVar("T")


class ResultStore(StoredRecords):
    """Trials and winners of attention and of autotuned kernels; open one with `ResultStore.open`."""

    def record(self, trial: AnyTrial) -> None:
        """Store one trial; a later trial of the same device, environment, kernel, shape and config replaces it.

        Raises:
            UsageError: the trial breaks a rule, such as a time that is not positive or an outcome `ok` without one.
        """
        self._write(lambda writer: writer.put_trial(trial))

    def put_all(self, trials: Iterable[AnyTrial], bests: Iterable[AnyBest]) -> None:
        """Store what was measured here as `record` and `set_best` do, in one transaction: all of it or nothing.

        Raises:
            UsageError: a trial or winner breaks a rule.
        """
        kept_trials, kept_bests = tuple(trials), tuple(bests)

        def put(writer: BulkWriter) -> None:
            for trial in kept_trials:
                writer.put_trial(trial)
            for best in kept_bests:
                writer.put_best(best)

        self._write(put)

    def set_best(self, best: AnyBest) -> bool:
        """Store the winner of a shape on a device and returns whether it was stored.

        A measured one always replaces a predicted one and never the other way round; of two measured ones the younger
        stays, since it was measured against the older one.

        Raises:
            UsageError: the best breaks a rule, such as a measured origin without a time.
        """
        return self._write(lambda writer: writer.put_best(best))

    def export_json(self, device: DeviceSpec | None = None, *, trials: bool = False) -> Document:
        """Return the winners of one device, those of attention with what they compete against today, and on request all
        trials, in the format of `db/exchange/document.py`. The device may be left out when the store knows one only.

        Raises:
            UsageError: no device was named and the store knows none or several.
        """
        chosen = device or self._only_device()
        bests = map(with_todays_rivals, self.all_bests(chosen))
        return export_document(chosen, bests, self.all_trials(chosen) if trials else None)

    def import_json(self, document: Any, *, trust: bool = False) -> ImportCounts:
        """Store what `export_json` gave as `merge` does: all of it or, when anything is wrong, nothing.

        Raises:
            ImportRejectedError: a field is unknown, missing or absurd; the message names its place in the document.
        """
        bests, trials = records_in(document)
        return self.merge([Results(bests=tuple(bests), trials=tuple(trials))], trust=trust)

    def merge(self, sources: Iterable[Results], *, trust: bool = False) -> ImportCounts:
        """Take in results from elsewhere, in one transaction. `winner_of` in db/exchange/merging.py says which winner
        stays; of two trials of one candidate, one made here, then the younger.

        Args:
            sources: what is taken in.
            trust: believe what was measured there. Else `distrust_results` says what of it is believed.
        """
        believed = [source if trust else distrust_results(source) for source in sources]
        return self._write(lambda writer: merge_into(writer, writer.bests(self.label), believed))

    def remove_best(self, best: AnyBest) -> None:
        """Forget the winner of this shape on this device, since it must not be used; another config that has won
        meanwhile stays."""
        self._write(lambda writer: writer.remove_best(best))

    def back_up(self, *, unless_within_seconds: float = 0.0) -> None:
        """Make a backup of a SQLite file next to it, as db/tables/backups.py says, unless there is one of this age."""
        if self.target.path is not None:
            back_up(self.target.path, unless_within_seconds=unless_within_seconds)

    def clean(self, rules: Rules, *, dry_run: bool) -> CleanCounts:
        """Drop the trials that can no longer be compared with new ones, and what nothing refers to afterwards; the
        winners stay. A dry run only counts."""
        self._require_writable()
        with translate_errors(self.target), self._engines.slow_answer_warning():
            return clean(self._engines, rules, dry_run=dry_run)

    def health(self) -> StoreHealth:
        """Return where the store is and in what state; reads the whole file to check it."""
        with self._engines.slow_answer_warning():
            return health_of(self._engines)

    def correct(self) -> list[BitCorrection]:
        """Correct single bits of the rows of a SQLite file, after a backup; returns where. A server has its own
        checksums."""
        self._require_writable()
        path = self.target.path
        if path is None:
            return []
        back_up(path)
        with (
            translate_errors(self.target),
            closing(connect_sqlite(f"{path.as_uri()}?mode=rw", self._engines.lock_timeout_seconds)) as connection,
        ):
            connection.execute("BEGIN IMMEDIATE")
            found = correct(connection)
            connection.execute("COMMIT")
        return found

    def warn_of_damage(self) -> None:
        """Say what is wrong with a file that is not large: rows may be missing from what it answers."""
        warn_of_damage(self._engines)

    def _only_device(self) -> DeviceSpec:
        known = self.devices()
        if len(known) != 1:
            names = shown(", ".join(device.name for device in known) or "none", 500)
            raise UsageError(
                f"An export is of one device, but {self.label} has results of {names}. Name one by --device."
            )
        return known[0]

    def _write(self, work: Callable[[BulkWriter], T]) -> T:
        return self._writing(lambda session: work(BulkWriter(session)))
