"""Users' kernels: user_trial, user_best, and the view `user_dispatch`. The tables of 0001 stay as they are."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

DISPATCH_VIEW = """
CREATE VIEW user_dispatch AS
SELECT
    device.key AS device_key,
    user_best.kernel AS kernel,
    user_best.source_hash AS source_hash,
    user_best.problem AS problem,
    user_best.config AS config,
    user_best.time_us AS time_us,
    environment.triton AS triton,
    environment.ptxas AS ptxas,
    environment.driver AS driver
FROM user_best
JOIN device ON device.id = user_best.device_id
JOIN environment ON environment.id = user_best.environment_id
"""


def upgrade() -> None:
    _create_trial()
    _create_best()
    op.execute(DISPATCH_VIEW)


def _create_trial() -> None:
    op.create_table(
        "user_trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(length=256), nullable=False),
        sa.Column("source_hash", sa.String(length=16), nullable=False),
        sa.Column("problem", sa.String(length=1000), nullable=False),
        sa.Column("config", sa.String(length=500), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gpu_uuid", sa.String(length=64), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("time_us", sa.Double(), nullable=True),
        sa.Column("relative_to_anchor", sa.Double(), nullable=True),
        sa.Column("samples_us", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.CheckConstraint("(outcome = 'ok') = (time_us IS NOT NULL)", name=op.f("ck_user_trial_only_ok_has_a_time")),
        sa.CheckConstraint("time_us > 0 AND time_us < 1e12", name=op.f("ck_user_trial_time_is_positive_and_finite")),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_user_trial_device_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_user_trial_environment_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_user_trial")),
        sa.UniqueConstraint(
            "device_id", "kernel", "source_hash", "problem", "environment_id", "config", name="uq_user_trial_candidate"
        ),
    )


def _create_best() -> None:
    op.create_table(
        "user_best",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(length=256), nullable=False),
        sa.Column("source_hash", sa.String(length=16), nullable=False),
        sa.Column("problem", sa.String(length=1000), nullable=False),
        sa.Column("config", sa.String(length=500), nullable=False),
        sa.Column("default_config", sa.String(length=500), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gpu_uuid", sa.String(length=64), nullable=True),
        sa.Column("time_us", sa.Double(), nullable=False),
        sa.Column("default_time_us", sa.Double(), nullable=True),
        sa.Column("speedup_over_default", sa.Double(), nullable=True),
        sa.Column("speedup_low", sa.Double(), nullable=True),
        sa.Column("speedup_high", sa.Double(), nullable=True),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.CheckConstraint("time_us > 0 AND time_us < 1e12", name=op.f("ck_user_best_time_is_positive_and_finite")),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_user_best_device_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_user_best_environment_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_user_best")),
        sa.UniqueConstraint("device_id", "kernel", "source_hash", "problem", name="uq_user_best_problem"),
    )
