"""Trials and winners of autotuned kernels become rows of `trial` and `best`.

`user_trial` and `user_best` are views for one version, with the columns that the tables had. An index tells at once
whether a process of an older version, which was still open, has added rows without a checksum.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

from blocktune.db.migrations.user_rows import move_user_rows

revision = "0008"
down_revision = "0007"

ONLY_OF_ATTENTION: dict[str, dict[str, TypeEngine[Any]]] = {
    "shape": {
        "direction": sa.String(length=32),
        "dtype": sa.String(length=32),
        "causal": sa.String(length=32),
        "batch": sa.BigInteger(),
        "num_heads": sa.BigInteger(),
        "num_heads_kv": sa.BigInteger(),
        "seqlen_q": sa.BigInteger(),
        "seqlen_k": sa.BigInteger(),
        "head_dim": sa.BigInteger(),
        "head_dim_v": sa.BigInteger(),
    },
    "config": {
        "kernel": sa.String(length=64),
        "block_m": sa.Integer(),
        "block_n": sa.Integer(),
        "num_warps": sa.Integer(),
        "num_stages": sa.Integer(),
    },
}
"""The columns that become nullable, by table."""

DISPATCH_VIEW = """
CREATE VIEW dispatch AS
SELECT
    device.key AS device_key,
    shape.document AS shape_json,
    config.document AS config_json,
    kernel.source_hash AS kernel_hash,
    best.origin AS origin,
    best.time_us AS time_us,
    environment.triton AS triton,
    environment.ptxas AS ptxas,
    environment.torch AS torch,
    environment.cuda AS cuda,
    environment.driver AS driver,
    environment.power_limit_w AS power_limit_w,
    best.served_checksum AS checksum
FROM best
JOIN device ON device.id = best.device_id
JOIN shape ON shape.id = best.shape_id
JOIN config ON config.id = best.config_id
JOIN kernel ON kernel.id = best.kernel_id
JOIN environment ON environment.id = best.environment_id
WHERE shape.direction IS NOT NULL
"""

USER_DISPATCH_VIEW = """
CREATE VIEW user_dispatch AS
SELECT
    device.key AS device_key,
    kernel.name AS kernel,
    kernel.source_hash AS source_hash,
    shape.document AS problem,
    config.document AS config,
    best.time_us AS time_us,
    environment.triton AS triton,
    environment.ptxas AS ptxas,
    environment.driver AS driver,
    best.served_checksum AS checksum
FROM best
JOIN device ON device.id = best.device_id
JOIN shape ON shape.id = best.shape_id
JOIN config ON config.id = best.config_id
JOIN kernel ON kernel.id = best.kernel_id
JOIN environment ON environment.id = best.environment_id
WHERE shape.direction IS NULL
"""

USER_TRIAL_VIEW = """
CREATE VIEW user_trial AS
SELECT
    trial.id AS id,
    trial.device_id AS device_id,
    trial.environment_id AS environment_id,
    kernel.name AS kernel,
    kernel.source_hash AS source_hash,
    shape.document AS problem,
    config.document AS config,
    trial.created_at AS created_at,
    trial.gpu_uuid AS gpu_uuid,
    trial.outcome AS outcome,
    trial.error AS error,
    trial.time_us AS time_us,
    trial.relative_to_anchor AS relative_to_anchor,
    trial.samples_us AS samples_us,
    trial.compile_seconds + trial.bench_seconds AS seconds,
    trial.checksum AS checksum,
    trial.sm_clock_mhz AS sm_clock_mhz,
    trial.memory_clock_mhz AS memory_clock_mhz,
    trial.temperature_c AS temperature_c,
    trial.throttle_reasons AS throttle_reasons,
    trial.other_processes AS other_processes
FROM trial
JOIN shape ON shape.id = trial.shape_id
JOIN config ON config.id = trial.config_id
JOIN kernel ON kernel.id = trial.kernel_id
WHERE shape.direction IS NULL
"""

USER_BEST_VIEW = """
CREATE VIEW user_best AS
SELECT
    best.id AS id,
    best.device_id AS device_id,
    best.environment_id AS environment_id,
    kernel.name AS kernel,
    kernel.source_hash AS source_hash,
    shape.document AS problem,
    config.document AS config,
    first.document AS default_config,
    best.created_at AS created_at,
    best.gpu_uuid AS gpu_uuid,
    best.time_us AS time_us,
    best.default_time_us AS default_time_us,
    best.speedup_over_default AS speedup_over_default,
    best.speedup_low AS speedup_low,
    best.speedup_high AS speedup_high,
    best.trials AS trials,
    best.checksum AS checksum,
    best.served_checksum AS served_checksum
FROM best
JOIN shape ON shape.id = best.shape_id
JOIN config ON config.id = best.config_id
JOIN kernel ON kernel.id = best.kernel_id
LEFT JOIN config AS first ON first.id = best.default_config_id
WHERE shape.direction IS NULL
"""


def upgrade() -> None:
    op.execute("DROP VIEW dispatch")
    op.execute("DROP VIEW user_dispatch")
    _widen()
    move_user_rows(op.get_bind())
    op.drop_table("user_trial")
    op.drop_table("user_best")
    for view in (DISPATCH_VIEW, USER_DISPATCH_VIEW, USER_TRIAL_VIEW, USER_BEST_VIEW):
        op.execute(view)


def _widen() -> None:
    """Make room for kernels of any name, for problems and configs of any kernel, and for a winner of each source."""
    for table, columns in ONLY_OF_ATTENTION.items():
        with op.batch_alter_table(table) as batch:
            for name, type_ in columns.items():
                batch.alter_column(name, existing_type=type_, nullable=True)
    with op.batch_alter_table("kernel") as batch:
        batch.alter_column("name", existing_type=sa.String(length=64), type_=sa.String(length=256))
    checks = (  # SQLite makes the table again, and not every Alembic reads these from it
        sa.CheckConstraint("origin <> 'measured' OR time_us IS NOT NULL", name=op.f("ck_best_measured_has_a_time")),
        sa.CheckConstraint("time_us > 0 AND time_us < 1e12", name=op.f("ck_best_time_is_positive_and_finite")),
    )
    with op.batch_alter_table("best", table_args=checks) as batch:
        batch.drop_constraint(op.f("uq_best_device_id_shape_id"), type_="unique")
        batch.create_unique_constraint(
            op.f("uq_best_device_id_shape_id_kernel_id"), ["device_id", "shape_id", "kernel_id"]
        )
    op.create_index(op.f("ix_best_kernel_id"), "best", ["kernel_id"])
    for table in ("trial", "best"):
        unchecked = sa.text("checksum IS NULL")
        op.create_index(
            op.f(f"ix_{table}_unchecked"), table, ["id"], sqlite_where=unchecked, postgresql_where=unchecked
        )
