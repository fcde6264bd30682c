"""The store: what was measured, kept the moment it was measured."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from math import log2
from typing import Any, TypeVar, overload

from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.orm import Session

from blocktune.db.connected_store import ConnectedStore
from blocktune.db.exchange.document import Document, document_from, shape_order
from blocktune.db.exchange.importing import records_in
from blocktune.db.exchange.merging import ImportCounts, Results, merge_into, unverified
from blocktune.db.records.bulk_writer import BulkWriter
from blocktune.db.records.correction import BitCorrection, correct
from blocktune.db.records.health import StoreHealth, health_of, warn_of_damage
from blocktune.db.records.linked_rows import linked_rows
from blocktune.db.records.near_shapes import Distance, nearest_ids, nearest_outlines, outlines
from blocktune.db.records.reading import id_of, readable_records
from blocktune.db.records.records import AnyBest, AnyTrial, Best, Environment, KernelBest, KernelTrial, Trial
from blocktune.db.records.row_values import IMPORTED, shape_documents, whole_device
from blocktune.db.records.rows import best_of, trial_of
from blocktune.db.rivals import with_todays_rivals
from blocktune.db.tables.backups import back_up
from blocktune.db.tables.cleaning import CleanCounts, Rules, clean
from blocktune.db.tables.models import BestRow, DeviceRow, EnvironmentRow, KernelRow, ShapeRow, TrialRow
from blocktune.db.tables.sqlite_file import connect_sqlite
from blocktune.db.tables.store_errors import translated
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import KernelProblem
from blocktune.runtime.store_reader.places import default_store_path
from blocktune.runtime.store_reader.tuned_config import TunedConfig

__all__ = ["ResultStore", "default_store_path"]

T = TypeVar("T")


class ResultStore(ConnectedStore):
    """Trials and winners of attention and of autotuned kernels; open one with `ResultStore.open`.

    A query without a shape is one for attention. An autotuned kernel has winners for each of its sources, by
    `kernel_hash`.
    """

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

    @overload
    def trials(
        self,
        device: DeviceSpec | None = None,
        shape: AttentionShape | None = None,
        *,
        environment: Environment | None = None,
        kernel_hash: str | None = None,
    ) -> list[Trial]: ...

    @overload
    def trials(
        self,
        device: DeviceSpec | None,
        shape: KernelProblem,
        *,
        environment: Environment | None = None,
        kernel_hash: str | None = None,
    ) -> list[KernelTrial]: ...

    def trials(
        self,
        device: DeviceSpec | None = None,
        shape: AttentionShape | KernelProblem | None = None,
        *,
        environment: Environment | None = None,
        kernel_hash: str | None = None,
    ) -> list[Any]:
        """Return the trials that match everything given, oldest first.

        An environment asks for what was made by that software here, so imported trials are not among these.
        """
        query = _on(device, select(TrialRow)).order_by(TrialRow.created_at, TrialRow.id)
        query = query.where(_is_of(TrialRow, shape), *_of_source(TrialRow, shape, kernel_hash))
        if environment is not None:
            query = query.where(TrialRow.environment_id == id_of(EnvironmentRow, digest=environment.digest))
            # a GPU without an id is NULL here, which `<>` would leave out
            query = query.where(TrialRow.gpu_uuid.is_distinct_from(IMPORTED))
        return self._read(query, trial_of)

    @overload
    def best(self, device: DeviceSpec, shape: AttentionShape, *, kernel_hash: str | None = None) -> Best | None: ...

    @overload
    def best(
        self, device: DeviceSpec, shape: KernelProblem, *, kernel_hash: str | None = None
    ) -> KernelBest | None: ...

    def best(
        self, device: DeviceSpec, shape: AttentionShape | KernelProblem, *, kernel_hash: str | None = None
    ) -> AnyBest | None:
        """Return the winner of exactly this shape on this device; of several sources, of that which won last."""
        query = _on(device, select(BestRow)).where(_is_of(BestRow, shape))
        found = self._read(query.where(*_of_source(BestRow, shape, kernel_hash)), best_of)
        return max(found, key=lambda best: best.created_at, default=None)

    def bests(self, device: DeviceSpec | None = None, shape: AttentionShape | None = None) -> list[Best]:
        """Return the winners of attention that match everything given."""
        found = self._linked_bests(device, _is_of(BestRow, shape))
        return sorted(found, key=lambda best: (best.device.key, *shape_order(best.shape)))

    def kernel_bests(self, device: DeviceSpec | None = None) -> list[KernelBest]:
        """Return the winners of autotuned kernels, on one device or on all, by kernel, source and problem."""
        found = self._linked_bests(device, BestRow.shape_id.in_(_KERNEL_PROBLEMS))
        return sorted(found, key=_kernel_order)

    def all_bests(self, device: DeviceSpec | None = None) -> list[AnyBest]:
        """Return the winners of all kernels, on one device or on all."""
        return [*self.bests(device), *self.kernel_bests(device)]

    def all_trials(self, device: DeviceSpec | None = None) -> list[AnyTrial]:
        """Return the trials of all kernels, on one device or on all, oldest first."""
        return self._read(_on(device, select(TrialRow)).order_by(TrialRow.created_at, TrialRow.id), trial_of)

    def nearest(self, device: DeviceSpec, shape: AttentionShape, *, limit: int = 4) -> list[Best]:
        """Return winners of shapes that run the same code on this device (equal direction, data type, head dimensions,
        causal mask and query heads a key/value head), nearest first by the logarithms of their lengths, then of
        their number of heads. The shape's own winner, if any, is the nearest."""
        found = self._of_ids(lambda session: session.scalars(nearest_ids(_on(device, select(BestRow)), shape, limit)))
        return sorted(found, key=lambda best: _how_far(best, shape))  # the ids were in order, their rows come in any

    def configs(self, device: DeviceSpec) -> Iterable[TunedConfig]:
        """Return the winners of a device, as the dispatcher wants them."""
        return _configs_of(self.bests(device))

    def configs_near(
        self, device: DeviceSpec, shapes: Sequence[AttentionShape], distance: Distance, limit: int
    ) -> list[TunedConfig]:
        """Return of `configs` what is near one of several shapes of one kind.

        Args:
            device: of interest.
            shapes: of one direction, with equal head dimensions, features and sizes of elements.
            distance: of two shapes.
            limit: how many winners of an origin for each of the shapes.
        """
        query = outlines(_on(device, select(BestRow)), shapes[0])
        return _configs_of(
            self._of_ids(lambda session: nearest_outlines(session.execute(query), shapes, distance, limit))
        )

    def devices(self) -> list[DeviceSpec]:
        """Return the devices that have trials or winners, without their uuid."""
        return self._read(select(DeviceRow).order_by(DeviceRow.key), whole_device)

    def export_json(self, device: DeviceSpec | None = None, *, trials: bool = False) -> Document:
        """Return the winners of one device, those of attention with what they compete against today, and on request all
        trials, in the format of `db/exchange/document.py`. The device may be left out when the store knows one only.

        Raises:
            UsageError: no device was named and the store knows none or several.
        """
        chosen = device or self._only_device()
        bests = map(with_todays_rivals, self.all_bests(chosen))
        return document_from(chosen, bests, self.all_trials(chosen) if trials else None)

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
            trust: believe what was measured there. Else `unverified` says what of it is believed.
        """
        believed = [source if trust else unverified(source) for source in sources]
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
        with translated(self.target), self._engines.slow_answer_warning():
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
            translated(self.target),
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

    def _linked_bests(self, device: DeviceSpec | None, condition: ColumnElement[bool]) -> list[Any]:
        """Return the winners that meet a condition."""
        query = _on(device, select(BestRow)).where(condition)
        return self._reading(lambda session: readable_records(session, query, best_of, self.label, linked_rows))

    def _of_ids(self, choose: Callable[[Session], Iterable[int]]) -> list[Best]:
        """Return the winners whose ids are chosen in the transaction that reads them."""

        def chosen(session: Session) -> list[Best]:
            query = select(BestRow).where(BestRow.id.in_(list(choose(session))))
            return readable_records(session, query, best_of, self.label)

        return self._reading(chosen)


def _on(device: DeviceSpec | None, query: Select[Any]) -> Select[Any]:
    """Return the part of a query of trials or winners that is of one device, if there is one."""
    row_type = query.column_descriptions[0]["entity"]
    return query if device is None else query.where(row_type.device_id == id_of(DeviceRow, key=device.key))


_KERNEL_PROBLEMS = select(ShapeRow.id).where(ShapeRow.direction.is_(None))


def _is_of(row_type: type[TrialRow | BestRow], shape: AttentionShape | KernelProblem | None) -> ColumnElement[bool]:
    """Return the condition that rows are of a shape, or of attention: also those whose shape is missing, which a reader
    must name."""
    if shape is None:
        return row_type.shape_id.not_in(_KERNEL_PROBLEMS)
    return row_type.shape_id.in_(select(ShapeRow.id).where(ShapeRow.document.in_(shape_documents(shape))))


def _of_source(
    row_type: type[TrialRow | BestRow], shape: AttentionShape | KernelProblem | None, kernel_hash: str | None
) -> list[ColumnElement[bool]]:
    """Return the conditions that rows are of an autotuned kernel, and of one source."""
    key = {} if kernel_hash is None else {"source_hash": kernel_hash}
    if isinstance(shape, KernelProblem):
        key["name"] = shape.kernel
    return [row_type.kernel_id.in_(select(KernelRow.id).filter_by(**key))] if key else []


def _kernel_order(best: KernelBest) -> tuple[str, ...]:
    return best.device.key, best.shape.kernel, best.kernel_hash, best.shape.document


def _configs_of(bests: Iterable[Best]) -> list[TunedConfig]:
    return [
        TunedConfig(shape=best.shape, config=best.config, origin=best.origin, time_us=best.time_us) for best in bests
    ]


def _how_far(best: Best, shape: AttentionShape) -> tuple[Any, ...]:
    """Return a key by which winners are in the order of `nearest_ids`."""
    lengths = abs(log2(best.shape.seqlen_q / shape.seqlen_q)) + abs(log2(best.shape.seqlen_k / shape.seqlen_k))
    heads = abs(log2(best.shape.batch * best.shape.num_heads / (shape.batch * shape.num_heads)))
    return lengths, heads, *shape_order(best.shape)
