"""Trials and winners as a store answers for them."""

from collections.abc import Callable, Iterable, Sequence
from math import log2
from typing import Any, overload

from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.orm import Session

from blocktune.db.connected_store import ConnectedStore
from blocktune.db.exchange.document import shape_order
from blocktune.db.records.linked_rows import linked_rows
from blocktune.db.records.near_shapes import Distance, nearest_ids, nearest_outlines, outlines
from blocktune.db.records.reading import id_of, readable_records
from blocktune.db.records.records import AnyBest, AnyTrial, Best, Environment, KernelBest, KernelTrial, Trial
from blocktune.db.records.row_values import IMPORTED, shape_documents, whole_device
from blocktune.db.records.rows import best_of, trial_of
from blocktune.db.tables.models import BestRow, DeviceRow, EnvironmentRow, KernelRow, ShapeRow, TrialRow
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import KernelProblem
from blocktune.runtime.store_reader.tuned_config import TunedConfig


class StoredRecords(ConnectedStore):
    """Reads trials and winners.

    A query without a shape is one for attention. An autotuned kernel has winners for each of its sources, by
    `kernel_hash`.
    """

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
        query = _on_device(device, select(TrialRow)).order_by(TrialRow.created_at, TrialRow.id)
        query = query.where(_has_shape(TrialRow, shape), *_source_conditions(TrialRow, shape, kernel_hash))
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
        query = _on_device(device, select(BestRow)).where(_has_shape(BestRow, shape))
        found = self._read(query.where(*_source_conditions(BestRow, shape, kernel_hash)), best_of)
        return max(found, key=lambda best: best.created_at, default=None)

    def bests(self, device: DeviceSpec | None = None, shape: AttentionShape | None = None) -> list[Best]:
        """Return the winners of attention that match everything given."""
        found = self._linked_bests(device, _has_shape(BestRow, shape))
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
        return self._read(_on_device(device, select(TrialRow)).order_by(TrialRow.created_at, TrialRow.id), trial_of)

    def nearest(self, device: DeviceSpec, shape: AttentionShape, *, limit: int = 4) -> list[Best]:
        """Return winners of shapes that run the same code on this device (equal direction, data type, head dimensions,
        causal mask and query heads a key/value head), nearest first by the logarithms of their lengths, then of
        their number of heads. The shape's own winner, if any, is the nearest."""
        found = self._bests_by_ids(
            lambda session: session.scalars(nearest_ids(_on_device(device, select(BestRow)), shape, limit))
        )
        return sorted(found, key=lambda best: _distance(best, shape))  # the ids were in order, their rows come in any

    def configs(self, device: DeviceSpec) -> Iterable[TunedConfig]:
        """Return the winners of a device, as the dispatcher wants them."""
        return _configs_of(self.bests(device))

    def configs_near(
        self, device: DeviceSpec, shapes: Sequence[AttentionShape], distance: Distance, limit: int
    ) -> list[TunedConfig]:
        """Return the `configs` that are near one of several shapes, which are of one kind.

        Args:
            device: of interest.
            shapes: of one direction, with equal head dimensions, features and sizes of elements.
            distance: of two shapes.
            limit: how many winners of an origin for each of the shapes.
        """
        query = outlines(_on_device(device, select(BestRow)), shapes[0])
        return _configs_of(
            self._bests_by_ids(lambda session: nearest_outlines(session.execute(query), shapes, distance, limit))
        )

    def devices(self) -> list[DeviceSpec]:
        """Return the devices that have trials or winners, without their uuid."""
        return self._read(select(DeviceRow).order_by(DeviceRow.key), whole_device)

    def _linked_bests(self, device: DeviceSpec | None, condition: ColumnElement[bool]) -> list[Any]:
        """Return the winners that meet a condition."""
        query = _on_device(device, select(BestRow)).where(condition)
        return self._reading(lambda session: readable_records(session, query, best_of, self.label, linked_rows))

    def _bests_by_ids(self, choose: Callable[[Session], Iterable[int]]) -> list[Best]:
        """Return the winners whose ids are chosen in the transaction that reads them."""

        def chosen(session: Session) -> list[Best]:
            query = select(BestRow).where(BestRow.id.in_(list(choose(session))))
            return readable_records(session, query, best_of, self.label)

        return self._reading(chosen)


def _on_device(device: DeviceSpec | None, query: Select[Any]) -> Select[Any]:
    """Return a query of trials or winners, limited to one device if there is one."""
    row_type = query.column_descriptions[0]["entity"]
    return query if device is None else query.where(row_type.device_id == id_of(DeviceRow, key=device.key))


_KERNEL_PROBLEMS = select(ShapeRow.id).where(ShapeRow.direction.is_(None))


def _has_shape(row_type: type[TrialRow | BestRow], shape: AttentionShape | KernelProblem | None) -> ColumnElement[bool]:
    """Return the condition that rows are of a shape, or of attention: also those whose shape is missing, which a reader
    must name."""
    if shape is None:
        return row_type.shape_id.not_in(_KERNEL_PROBLEMS)
    return row_type.shape_id.in_(select(ShapeRow.id).where(ShapeRow.document.in_(shape_documents(shape))))


def _source_conditions(
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


def _distance(best: Best, shape: AttentionShape) -> tuple[Any, ...]:
    """Return a key by which winners are in the order of `nearest_ids`."""
    lengths = abs(log2(best.shape.seqlen_q / shape.seqlen_q)) + abs(log2(best.shape.seqlen_k / shape.seqlen_k))
    heads = abs(log2(best.shape.batch * best.shape.num_heads / (shape.batch * shape.num_heads)))
    return lengths, heads, *shape_order(best.shape)
