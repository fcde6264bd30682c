"""Writes thousands of records by a few statements for all, so that a merge holds the store's lock for moments."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, case, insert, select, update

from blocktune.db.records.bounds import require_sound_best
from blocktune.db.records.records import AnyBest, AnyTrial
from blocktune.db.records.row_values import IMPORTED, config_columns, document_of, shape_columns
from blocktune.db.records.row_writer import (
    RowWriter,
    best_columns,
    latest_date,
    sound_trial,
    trial_columns,
)
from blocktune.db.tables.models import BestRow, ConfigRow, ShapeRow, TrialRow

CANDIDATE = (
    TrialRow.device_id,
    TrialRow.shape_id,
    TrialRow.kernel_id,
    TrialRow.environment_id,
    TrialRow.config_id,
)
"""What tells trials apart."""

_SHAPES_AT_ONCE = 1000
"""Of a query: databases bound its parameters."""

Standing = tuple[bool, datetime]
"""What of two trials of one candidate stays: one made here, then the younger."""


class BulkWriter(RowWriter):
    """Writes many records at once."""

    def put_newer_trials(self, trials: Sequence[AnyTrial]) -> int:
        """Store trials in place of earlier ones of the same candidates, unless these are younger or were made here and
        the new ones were not. Returns how many were stored.

        Raises:
            UsageError: a trial breaks a rule.
        """
        sound = [sound_trial(trial) for trial in trials]
        self._refer_to((trial.shape, trial.config) for trial in sound)
        candidates = [self._candidate(trial) for trial in sound]
        held = self._held_trials(candidates)
        changes: dict[tuple[int, ...], dict[str, Any]] = {}
        count, latest = 0, latest_date()
        for trial, candidate in zip(sound, candidates, strict=True):
            key, standing = tuple(candidate.values()), (not trial.imported, trial.created_at)
            row_id, least = held.get(key, (None, None))
            if least is None or least < standing or least[1] > latest:
                held[key] = row_id, standing
                changes[key] = {"id": row_id} | candidate | trial_columns(trial)
                count += 1
        self._write(TrialRow, changes.values())
        return count

    def replace_bests(self, bests: Sequence[AnyBest]) -> None:
        """Store winners, of each place one, whatever is stored.

        Raises:
            UsageError: a winner breaks a rule.
        """
        for best in bests:
            require_sound_best(best)
        configs = ((best.shape, config) for best in bests for config in (best.config, best.default, best.paper))
        self._refer_to((shape, config) for shape, config in configs if config is not None)
        held = self._held_bests()
        self._write(
            BestRow,
            [
                {"id": held.get(tuple(self._best_place(best).values()))} | self._best_links(best) | best_columns(best)
                for best in bests
            ],
        )

    def _held_bests(self) -> dict[tuple[int, ...], int]:
        """Return the ids of all winners by what tells them apart."""
        kernel_id = case((ShapeRow.direction.is_(None), BestRow.kernel_id))
        query = select(BestRow.id, BestRow.device_id, BestRow.shape_id, kernel_id).join(BestRow.shape)
        rows = self._session.execute(query)
        return {tuple(part for part in place if part is not None): row_id for row_id, *place in rows}

    def _held_trials(
        self, candidates: Sequence[Mapping[str, int]]
    ) -> dict[tuple[int, ...], tuple[int | None, Standing | None]]:
        """Return what is stored for the devices and shapes of these candidates: the id of a trial and what it stands
        for, by candidate. A fleet's store holds millions of others."""
        query = select(TrialRow.id, TrialRow.gpu_uuid, TrialRow.created_at, *CANDIDATE)
        query = query.where(TrialRow.device_id.in_({key["device_id"] for key in candidates}))
        shapes = sorted({key["shape_id"] for key in candidates})
        held: dict[tuple[int, ...], tuple[int | None, Standing | None]] = {}
        for start in range(0, len(shapes), _SHAPES_AT_ONCE):
            part = query.where(TrialRow.shape_id.in_(shapes[start : start + _SHAPES_AT_ONCE]))
            for row_id, uuid, at, *key in self._session.execute(part):
                held[tuple(key)] = row_id, (uuid != IMPORTED, at)
        return held

    def _refer_to(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Add the shapes and configs that are missing, and remember the ids of all."""
        shapes, configs = dict[Any, None](), dict[Any, None]()
        for shape, config in pairs:
            shapes[shape], configs[config] = None, None
        self._add_missing(ShapeRow, {document_of(shape): shape_columns(shape) for shape in shapes})
        self._add_missing(ConfigRow, {document_of(config): config_columns(config) for config in configs})

    def _add_missing(self, row_type: type[ShapeRow | ConfigRow], wanted: Mapping[str, Mapping[str, Any]]) -> None:
        self._remember(row_type)
        missing = [document for document in wanted if (row_type, (document,)) not in self._ids]
        if missing:
            self._session.execute(insert(row_type), [{"document": text, **wanted[text]} for text in missing])
            self._remember(row_type)

    def _remember(self, row_type: type[ShapeRow | ConfigRow]) -> None:
        rows = self._session.execute(select(row_type.document, row_type.id))
        self._ids |= {(row_type, (document,)): row_id for document, row_id in rows}

    def _write(self, row_type: type[TrialRow | BestRow], changes: Iterable[dict[str, Any]]) -> None:
        """Add the rows without an id and change those with one."""
        known, new = list[dict[str, Any]](), list[dict[str, Any]]()
        for change in changes:
            row_id = change.pop("id")
            (new if row_id is None else known).append(change if row_id is None else change | {"row_id": row_id})
        table = row_type.metadata.tables[row_type.__tablename__]
        if new:
            self._session.execute(insert(table), new)
        if known:
            names = [name for name in known[0] if name != "row_id"]
            statement = update(table).where(table.c.id == bindparam("row_id"))
            self._session.connection().execute(statement.values({name: bindparam(name) for name in names}), known)
