"""The first schema: devices, environments, kernels, shapes, configs, trials, bests, and the view `dispatch`.

A released migration never changes, so this one repeats the tables of that day and imports no model.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

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
    environment.driver AS driver
FROM best
JOIN device ON device.id = best.device_id
JOIN shape ON shape.id = best.shape_id
JOIN config ON config.id = best.config_id
JOIN kernel ON kernel.id = best.kernel_id
JOIN environment ON environment.id = best.environment_id
"""


def upgrade() -> None:
    _create_dimensions()
    _create_trial()
    _create_best()
    op.execute(DISPATCH_VIEW)


def _create_dimensions() -> None:
    op.create_table(
        "device",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=400), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("compute_capability", sa.String(length=8), nullable=False),
        sa.Column("num_sms", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_device")),
        sa.UniqueConstraint("key", name=op.f("uq_device_key")),
    )

    op.create_table(
        "environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=16), nullable=False),
        sa.Column("triton", sa.String(length=200), nullable=False),
        sa.Column("ptxas", sa.String(length=200), nullable=False),
        sa.Column("torch", sa.String(length=200), nullable=False),
        sa.Column("cuda", sa.String(length=200), nullable=False),
        sa.Column("driver", sa.String(length=200), nullable=False),
        sa.Column("protocol", sa.Integer(), nullable=False),
        sa.Column("power_limit_w", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environment")),
        sa.UniqueConstraint("digest", name=op.f("uq_environment_digest")),
    )

    op.create_table(
        "kernel",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("source_hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kernel")),
        sa.UniqueConstraint("name", "source_hash", name=op.f("uq_kernel_name_source_hash")),
    )

    op.create_table(
        "shape",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("document", sa.String(length=1000), nullable=False),
        sa.Column("direction", sa.String(length=32), nullable=False),
        sa.Column("dtype", sa.String(length=32), nullable=False),
        sa.Column("causal", sa.String(length=32), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("num_heads", sa.BigInteger(), nullable=False),
        sa.Column("num_heads_kv", sa.BigInteger(), nullable=False),
        sa.Column("seqlen_q", sa.BigInteger(), nullable=False),
        sa.Column("seqlen_k", sa.BigInteger(), nullable=False),
        sa.Column("head_dim", sa.BigInteger(), nullable=False),
        sa.Column("head_dim_v", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shape")),
        sa.UniqueConstraint("document", name=op.f("uq_shape_document")),
    )
    op.create_index(
        op.f("ix_shape_direction_dtype_causal_head_dim_head_dim_v"),
        "shape",
        ["direction", "dtype", "causal", "head_dim", "head_dim_v"],
        unique=False,
    )

    op.create_table(
        "config",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("document", sa.String(length=1000), nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=False),
        sa.Column("block_m", sa.Integer(), nullable=False),
        sa.Column("block_n", sa.Integer(), nullable=False),
        sa.Column("num_warps", sa.Integer(), nullable=False),
        sa.Column("num_stages", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_config")),
        sa.UniqueConstraint("document", name=op.f("uq_config_document")),
    )


def _create_trial() -> None:
    op.create_table(
        "trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("shape_id", sa.Integer(), nullable=False),
        sa.Column("kernel_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gpu_uuid", sa.String(length=64), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("time_us", sa.Double(), nullable=True),
        sa.Column("relative_to_anchor", sa.Double(), nullable=True),
        sa.Column("predicted_us", sa.Double(), nullable=True),
        sa.Column("samples_us", sa.JSON(), nullable=False),
        sa.Column("compile_seconds", sa.Double(), nullable=False),
        sa.Column("bench_seconds", sa.Double(), nullable=False),
        sa.Column("blocks_per_sm", sa.Integer(), nullable=True),
        sa.Column("occupancy", sa.Double(), nullable=True),
        sa.Column("limiters", sa.JSON(), nullable=False),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("shared_bytes", sa.Integer(), nullable=True),
        sa.Column("static_shared_bytes", sa.Integer(), nullable=True),
        sa.Column("stack_bytes", sa.Integer(), nullable=True),
        sa.Column("spill_bytes", sa.Integer(), nullable=True),
        sa.Column("num_warps", sa.Integer(), nullable=True),
        sa.Column("barriers", sa.Integer(), nullable=True),
        sa.Column("tensor_cores", sa.String(length=32), nullable=True),
        sa.Column("code_sha256", sa.String(length=64), nullable=True),
        sa.Column("sm_clock_mhz", sa.Integer(), nullable=True),
        sa.Column("memory_clock_mhz", sa.Integer(), nullable=True),
        sa.Column("temperature_c", sa.Integer(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("throttle_reasons", sa.BigInteger(), nullable=True),
        sa.Column("other_processes", sa.Integer(), nullable=True),
        sa.CheckConstraint("(outcome = 'ok') = (time_us IS NOT NULL)", name=op.f("ck_trial_only_ok_has_a_time")),
        sa.CheckConstraint("occupancy >= 0 AND occupancy <= 1", name=op.f("ck_trial_occupancy_is_a_fraction")),
        sa.CheckConstraint("time_us > 0 AND time_us < 1e12", name=op.f("ck_trial_time_is_positive_and_finite")),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name=op.f("fk_trial_config_id")),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_trial_device_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_trial_environment_id")),
        sa.ForeignKeyConstraint(["kernel_id"], ["kernel.id"], name=op.f("fk_trial_kernel_id")),
        sa.ForeignKeyConstraint(["shape_id"], ["shape.id"], name=op.f("fk_trial_shape_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trial")),
        sa.UniqueConstraint(
            "device_id", "shape_id", "kernel_id", "environment_id", "config_id", name="uq_trial_candidate"
        ),
    )


def _create_best() -> None:
    op.create_table(
        "best",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("shape_id", sa.Integer(), nullable=False),
        sa.Column("kernel_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("default_config_id", sa.Integer(), nullable=True),
        sa.Column("paper_config_id", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gpu_uuid", sa.String(length=64), nullable=True),
        sa.Column("origin", sa.String(length=32), nullable=False),
        sa.Column("time_us", sa.Double(), nullable=True),
        sa.Column("predicted_us", sa.Double(), nullable=True),
        sa.Column("default_time_us", sa.Double(), nullable=True),
        sa.Column("paper_time_us", sa.Double(), nullable=True),
        sa.Column("speedup_over_default", sa.Double(), nullable=True),
        sa.Column("speedup_low", sa.Double(), nullable=True),
        sa.Column("speedup_high", sa.Double(), nullable=True),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.CheckConstraint("origin <> 'measured' OR time_us IS NOT NULL", name=op.f("ck_best_measured_has_a_time")),
        sa.CheckConstraint("time_us > 0 AND time_us < 1e12", name=op.f("ck_best_time_is_positive_and_finite")),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name=op.f("fk_best_config_id")),
        sa.ForeignKeyConstraint(["default_config_id"], ["config.id"], name=op.f("fk_best_default_config_id")),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_best_device_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_best_environment_id")),
        sa.ForeignKeyConstraint(["kernel_id"], ["kernel.id"], name=op.f("fk_best_kernel_id")),
        sa.ForeignKeyConstraint(["paper_config_id"], ["config.id"], name=op.f("fk_best_paper_config_id")),
        sa.ForeignKeyConstraint(["shape_id"], ["shape.id"], name=op.f("fk_best_shape_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_best")),
        sa.UniqueConstraint("device_id", "shape_id", name=op.f("uq_best_device_id_shape_id")),
    )
