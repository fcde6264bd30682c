"""The tables of the store. Every column that is queried is typed; documents are canonical JSON text.

    device ──┐
    shape  ──┤
    kernel ──┼── trial     one row for each (device, shape, kernel, environment, config)
    environment ┤
    config ──┴── best      one row for each (device, shape), or (device, shape, kernel) of autotuned kernels

A value that another room owns (a device, a shape, a config) is stored whole as a `document`: what its `to_json` gives,
with sorted keys and no spaces, so that equal values have equal text. What was measured has columns of its own, which
db/tables/columns.py declares. The other columns repeat what queries need.

The problem of an autotuned kernel is a shape without the columns of attention, and its parameters are a config without
them; the kernel's name stands in `kernel` alone, so that kernels share both.

The view `dispatch` is what the production path reads with plain `sqlite3`, one row for each best of attention:
device_key, shape_json, config_json, kernel_hash, origin, time_us, triton, ptxas, torch, cuda, driver, power_limit_w and
the checksum of these; `user_dispatch` has one for each best of an autotuned kernel: device_key, kernel, source_hash,
problem, config, time_us, triton, ptxas, driver and their checksum. `migrations/versions/0008_any_kernel.py` makes both.
"""

from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    null,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedColumn, mapped_column, relationship

from blocktune.db.tables.columns import BestColumns, Telemetry, TrialColumns
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.column_kinds import LARGEST_COUNT, Kind, Prose, Real, Several, Whole, Word, columns_of

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


class Moment(TypeDecorator[datetime]):
    """A point in time with its zone. SQLite keeps none, so UTC is written and read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {datetime: Moment(), float: Double()}


def unchecked_index(table: str) -> Index:
    """Return an index of the rows without a checksum, which is empty unless an older blocktune still writes."""
    unchecked = text("checksum IS NULL")
    return Index(f"ix_{table}_unchecked", "id", sqlite_where=unchecked, postgresql_where=unchecked)


def checksum_column() -> Mapped[str | None]:
    """Return a column for the checksum of a row: db/records/row_checksums.py says of what. NULL in rows that an older
    blocktune has added since the store was opened for writing, and in those that break a rule."""
    return mapped_column(String(16), server_default=null())


def measured_columns(record_type: type[Any], *, optional: bool = False) -> dict[str, MappedColumn[Any]]:
    """Return the columns of a record's measured values, later ones apart. They go into the body of a table's class by
    `locals().update`, where they keep their place among the other columns.

    Args:
        record_type: declares them, see db/tables/columns.py.
        optional: the record as a whole may be missing, and all of them are NULL then.
    """
    return {
        column.name: mapped_column(_sql_type(column.kind), nullable=optional or column.optional)
        for column in columns_of(record_type)
        if not column.later
    }


def later_columns(record_type: type[Any]) -> dict[str, MappedColumn[Any]]:
    """Return the columns of a record's later values, which come last in the table. Rows of before have the default."""
    return {
        column.name: mapped_column(
            _sql_type(column.kind),
            nullable=column.optional,
            server_default=_server_default(column.default),
        )
        for column in columns_of(record_type)
        if column.later
    }


def _server_default(value: str | tuple[str, ...] | None) -> Any:
    """Return the default of a later column in rows of before; a list's is its JSON."""
    return null() if value is None else "[]" if value == () else str(value)


def _sql_type(kind: Kind) -> Any:
    match kind:
        case Real():
            return Double()
        case Whole():
            return Integer() if kind.high <= LARGEST_COUNT else BigInteger()
        case Word():
            return String(kind.longest)
        case Prose():
            return Text()
        case Several():
            return JSON()


class DeviceRow(Base):
    """One kind of GPU, by `DeviceSpec.key`. The document has no uuid: trials say on which piece they ran."""

    __tablename__ = "device"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(400), unique=True)
    name: Mapped[str] = mapped_column(String(256))
    compute_capability: Mapped[str] = mapped_column(String(8))
    num_sms: Mapped[int]
    source: Mapped[str] = mapped_column(String(16))
    document: Mapped[str] = mapped_column(Text)
    checksum: Mapped[str | None] = checksum_column()


class EnvironmentRow(Base):
    """The software and the regime that a time depends on, by `Environment.digest`."""

    __tablename__ = "environment"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(16), unique=True)
    triton: Mapped[str] = mapped_column(String(200))
    ptxas: Mapped[str] = mapped_column(String(200))
    torch: Mapped[str] = mapped_column(String(200))
    cuda: Mapped[str] = mapped_column(String(200))
    driver: Mapped[str] = mapped_column(String(200))
    protocol: Mapped[int]
    power_limit_w: Mapped[int]
    regime: Mapped[str] = mapped_column(String(16), server_default="sustained")


class KernelRow(Base):
    """One version of a kernel's device code."""

    __tablename__ = "kernel"
    __table_args__ = (UniqueConstraint("name", "source_hash"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(256))
    source_hash: Mapped[str] = mapped_column(String(64))


class ShapeRow(Base):
    """One attention problem, or one problem of autotuned kernels, which has a document alone."""

    __tablename__ = "shape"
    __table_args__ = (
        # What neighbouring shapes have in common.
        Index(None, "direction", "dtype", "causal", "head_dim", "head_dim_v"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    document: Mapped[str] = mapped_column(String(1000), unique=True)
    direction: Mapped[str | None] = mapped_column(String(32))
    dtype: Mapped[str | None] = mapped_column(String(32))
    causal: Mapped[str | None] = mapped_column(String(32))
    batch: Mapped[int | None] = mapped_column(BigInteger)
    num_heads: Mapped[int | None] = mapped_column(BigInteger)
    num_heads_kv: Mapped[int | None] = mapped_column(BigInteger)
    seqlen_q: Mapped[int | None] = mapped_column(BigInteger)
    seqlen_k: Mapped[int | None] = mapped_column(BigInteger)
    head_dim: Mapped[int | None] = mapped_column(BigInteger)
    head_dim_v: Mapped[int | None] = mapped_column(BigInteger)


class ConfigRow(Base):
    """One way to cut a kernel into blocks; the kernel's own parameters are in the document, and all of an autotuned
    kernel."""

    __tablename__ = "config"

    id: Mapped[int] = mapped_column(primary_key=True)
    document: Mapped[str] = mapped_column(String(1000), unique=True)
    kernel: Mapped[str | None] = mapped_column(String(64))
    block_m: Mapped[int | None]
    block_n: Mapped[int | None]
    num_warps: Mapped[int | None]
    num_stages: Mapped[int | None]


class TrialRow(Base):
    """One candidate and how it ended.

    Its `KernelResources` are all NULL when it never compiled. gpu_uuid is `imported` where the trial was not made here.
    """

    __tablename__ = "trial"
    __table_args__ = (
        # Device and shape lead: this index also answers "the trials of this shape on this device".
        UniqueConstraint(
            "device_id", "shape_id", "kernel_id", "environment_id", "config_id", name="uq_trial_candidate"
        ),
        unchecked_index("trial"),
        CheckConstraint("(outcome = 'ok') = (time_us IS NOT NULL)", name="only_ok_has_a_time"),
        CheckConstraint("time_us > 0 AND time_us < 1e12", name="time_is_positive_and_finite"),
        CheckConstraint("occupancy >= 0 AND occupancy <= 1", name="occupancy_is_a_fraction"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    shape_id: Mapped[int] = mapped_column(ForeignKey("shape.id"))
    kernel_id: Mapped[int] = mapped_column(ForeignKey("kernel.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"))
    created_at: Mapped[datetime]
    gpu_uuid: Mapped[str | None] = mapped_column(String(64))
    outcome: Mapped[str] = mapped_column(String(32))
    locals().update(
        measured_columns(TrialColumns) | measured_columns(KernelResources, optional=True) | measured_columns(Telemetry)
    )
    checksum: Mapped[str | None] = checksum_column()
    locals().update(later_columns(TrialColumns))

    device: Mapped[DeviceRow] = relationship(lazy="joined")
    shape: Mapped[ShapeRow] = relationship(lazy="joined")
    kernel: Mapped[KernelRow] = relationship(lazy="joined")
    environment: Mapped[EnvironmentRow] = relationship(lazy="joined")
    config: Mapped[ConfigRow] = relationship(lazy="joined")


class BestRow(Base):
    """The winner of one shape on one device, with its provenance. Of attention there is one, whatever the kernel is."""

    __tablename__ = "best"
    __table_args__ = (
        UniqueConstraint("device_id", "shape_id", "kernel_id"),
        Index(None, "kernel_id"),  # by which production finds the winners of one autotuned kernel
        unchecked_index("best"),
        CheckConstraint("origin <> 'measured' OR time_us IS NOT NULL", name="measured_has_a_time"),
        CheckConstraint("time_us > 0 AND time_us < 1e12", name="time_is_positive_and_finite"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    shape_id: Mapped[int] = mapped_column(ForeignKey("shape.id"))
    kernel_id: Mapped[int] = mapped_column(ForeignKey("kernel.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"))
    default_config_id: Mapped[int | None] = mapped_column(ForeignKey("config.id"))
    paper_config_id: Mapped[int | None] = mapped_column(ForeignKey("config.id"))
    created_at: Mapped[datetime]
    gpu_uuid: Mapped[str | None] = mapped_column(String(64))
    origin: Mapped[str] = mapped_column(String(32))
    locals().update(measured_columns(BestColumns))
    checksum: Mapped[str | None] = checksum_column()
    served_checksum: Mapped[str | None] = checksum_column()
    locals().update(later_columns(BestColumns))

    device: Mapped[DeviceRow] = relationship(lazy="joined")
    shape: Mapped[ShapeRow] = relationship(lazy="joined")
    kernel: Mapped[KernelRow] = relationship(lazy="joined")
    environment: Mapped[EnvironmentRow] = relationship(lazy="joined")
    config: Mapped[ConfigRow] = relationship(lazy="joined", foreign_keys=[config_id])
    default_config: Mapped[ConfigRow | None] = relationship(lazy="joined", foreign_keys=[default_config_id])
    paper_config: Mapped[ConfigRow | None] = relationship(lazy="joined", foreign_keys=[paper_config_id])
