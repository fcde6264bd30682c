"""Rows of autotuned kernels as the schemas 2 to 7 kept them, and how they become trials and winners like any other."""

import sqlalchemy as sa
from sqlalchemy import Column, Connection, MetaData, Table

OLD = MetaData()
"""Their tables. The columns at the end, with a default, are missing in files of the first schemas."""


USER_TRIAL = Table(
    "user_trial",
    OLD,
    Column("id", sa.Integer(), primary_key=True),
    Column("device_id", sa.Integer(), nullable=False),
    Column("environment_id", sa.Integer(), nullable=False),
    Column("kernel", sa.String(256), nullable=False),
    Column("source_hash", sa.String(16), nullable=False),
    Column("problem", sa.String(1000), nullable=False),
    Column("config", sa.String(500), nullable=False),
    Column("created_at", sa.DateTime(timezone=True), nullable=False),
    Column("gpu_uuid", sa.String(64)),
    Column("outcome", sa.String(32), nullable=False),
    Column("error", sa.Text(), nullable=False),
    Column("time_us", sa.Double()),
    Column("relative_to_anchor", sa.Double()),
    Column("samples_us", sa.JSON(), nullable=False),
    Column("seconds", sa.Double(), nullable=False),
    Column("checksum", sa.String(16), server_default=sa.null()),
    Column("sm_clock_mhz", sa.Integer(), server_default=sa.null()),
    Column("memory_clock_mhz", sa.Integer(), server_default=sa.null()),
    Column("temperature_c", sa.Integer(), server_default=sa.null()),
    Column("throttle_reasons", sa.BigInteger(), server_default=sa.null()),
    Column("other_processes", sa.Integer(), server_default=sa.null()),
)

USER_BEST = Table(
    "user_best",
    OLD,
    Column("id", sa.Integer(), primary_key=True),
    Column("device_id", sa.Integer(), nullable=False),
    Column("environment_id", sa.Integer(), nullable=False),
    Column("kernel", sa.String(256), nullable=False),
    Column("source_hash", sa.String(16), nullable=False),
    Column("problem", sa.String(1000), nullable=False),
    Column("config", sa.String(500), nullable=False),
    Column("default_config", sa.String(500), nullable=False),
    Column("created_at", sa.DateTime(timezone=True), nullable=False),
    Column("gpu_uuid", sa.String(64)),
    Column("time_us", sa.Double(), nullable=False),
    Column("default_time_us", sa.Double()),
    Column("speedup_over_default", sa.Double()),
    Column("speedup_low", sa.Double()),
    Column("speedup_high", sa.Double()),
    Column("trials", sa.Integer(), nullable=False),
    Column("checksum", sa.String(16), server_default=sa.null()),
    Column("served_checksum", sa.String(16), server_default=sa.null()),
)

_SHARED = (
    """
INSERT INTO kernel (name, source_hash)
SELECT kernel, source_hash FROM user_trial UNION SELECT kernel, source_hash FROM user_best
EXCEPT SELECT name, source_hash FROM kernel
""",
    """
INSERT INTO shape (document)
SELECT problem FROM user_trial UNION SELECT problem FROM user_best EXCEPT SELECT document FROM shape
""",
    """
INSERT INTO config (document)
SELECT config FROM user_trial UNION SELECT config FROM user_best UNION SELECT default_config FROM user_best
EXCEPT SELECT document FROM config
""",
)

_TRIALS = """
INSERT INTO trial (
    device_id, shape_id, kernel_id, environment_id, config_id, created_at, gpu_uuid, outcome, error, time_us,
    relative_to_anchor, samples_us, compile_seconds, bench_seconds, limiters, sm_clock_mhz, memory_clock_mhz,
    temperature_c, throttle_reasons, other_processes, checksum
)
SELECT
    old.device_id, shape.id, kernel.id, old.environment_id, config.id, old.created_at, old.gpu_uuid, old.outcome,
    old.error, old.time_us, old.relative_to_anchor, old.samples_us, old.seconds, 0, {no_limiters}, old.sm_clock_mhz,
    old.memory_clock_mhz, old.temperature_c, old.throttle_reasons, old.other_processes, old.checksum
FROM user_trial AS old
JOIN kernel ON kernel.name = old.kernel AND kernel.source_hash = old.source_hash
JOIN shape ON shape.document = old.problem
JOIN config ON config.document = old.config
WHERE old.id IS NOT NULL
ORDER BY old.id
ON CONFLICT DO NOTHING
"""

_BESTS = """
INSERT INTO best (
    device_id, shape_id, kernel_id, environment_id, config_id, default_config_id, created_at, gpu_uuid, origin, time_us,
    default_time_us, speedup_over_default, speedup_low, speedup_high, trials, checksum, served_checksum
)
SELECT
    old.device_id, shape.id, kernel.id, old.environment_id, config.id, first.id, old.created_at, old.gpu_uuid,
    'measured', old.time_us, old.default_time_us, old.speedup_over_default, old.speedup_low, old.speedup_high,
    old.trials, old.checksum, old.served_checksum
FROM user_best AS old
JOIN kernel ON kernel.name = old.kernel AND kernel.source_hash = old.source_hash
JOIN shape ON shape.document = old.problem
JOIN config ON config.document = old.config
JOIN config AS first ON first.document = old.default_config
WHERE old.id IS NOT NULL
ORDER BY old.id
ON CONFLICT DO NOTHING
"""


def move_user_rows(connection: Connection) -> None:
    """Copy the rows of `user_trial` and `user_best` into `trial` and `best`, with all that they refer to.

    They keep their checksums, of the row as it was: db/records/filling.py gives those their new ones that agree.
    """
    for statement in _SHARED:
        connection.exec_driver_sql(statement)
    no_limiters = "'[]'" if connection.dialect.name == "sqlite" else "CAST('[]' AS JSON)"
    connection.exec_driver_sql(_TRIALS.format(no_limiters=no_limiters))
    connection.exec_driver_sql(_BESTS)
