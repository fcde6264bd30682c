"""The tables of users' autotuned kernels: the same devices and environments, other problems and configs.

A kernel is known by where it can be imported, `module:name`, and by the hash of its source; a problem and a config are
canonical JSON text. The view `user_dispatch` is what the production path reads: device_key, kernel, source_hash,
problem, config, time_us, triton, ptxas, driver and their checksum. The tables are created by
`migrations/versions/0002_user_kernels.py`, the view as it is now by `0005_checksums.py`.
"""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from blocktune.db.tables.columns import UserBestColumns, UserTrialColumns
from blocktune.db.tables.models import Base as Base
from blocktune.db.tables.models import DeviceRow, EnvironmentRow, checksum_column, measured, measured_later


class UserTrialRow(Base):
    """One candidate of one problem and how it ended."""

    __tablename__ = "user_trial"
    __table_args__ = (
        UniqueConstraint(
            "device_id", "kernel", "source_hash", "problem", "environment_id", "config", name="uq_user_trial_candidate"
        ),
        CheckConstraint("(outcome = 'ok') = (time_us IS NOT NULL)", name="only_ok_has_a_time"),
        CheckConstraint("time_us > 0 AND time_us < 1e12", name="time_is_positive_and_finite"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    kernel: Mapped[str] = mapped_column(String(256))
    source_hash: Mapped[str] = mapped_column(String(16))
    problem: Mapped[str] = mapped_column(String(1000))
    config: Mapped[str] = mapped_column(String(500))
    created_at: Mapped[datetime]
    gpu_uuid: Mapped[str | None] = mapped_column(String(64))
    outcome: Mapped[str] = mapped_column(String(32))
    locals().update(measured(UserTrialColumns))
    checksum: Mapped[str | None] = checksum_column()
    locals().update(measured_later(UserTrialColumns))

    device: Mapped[DeviceRow] = relationship(lazy="joined")
    environment: Mapped[EnvironmentRow] = relationship(lazy="joined")


class UserBestRow(Base):
    """The winner of one problem on one device."""

    __tablename__ = "user_best"
    __table_args__ = (
        UniqueConstraint("device_id", "kernel", "source_hash", "problem", name="uq_user_best_problem"),
        CheckConstraint("time_us > 0 AND time_us < 1e12", name="time_is_positive_and_finite"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    kernel: Mapped[str] = mapped_column(String(256))
    source_hash: Mapped[str] = mapped_column(String(16))
    problem: Mapped[str] = mapped_column(String(1000))
    config: Mapped[str] = mapped_column(String(500))
    default_config: Mapped[str] = mapped_column(String(500))
    created_at: Mapped[datetime]
    gpu_uuid: Mapped[str | None] = mapped_column(String(64))
    locals().update(measured(UserBestColumns))
    checksum: Mapped[str | None] = checksum_column()
    served_checksum: Mapped[str | None] = checksum_column()

    device: Mapped[DeviceRow] = relationship(lazy="joined")
    environment: Mapped[EnvironmentRow] = relationship(lazy="joined")
