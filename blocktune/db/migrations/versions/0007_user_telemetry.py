"""Trials of tuned functions tell the state of the GPU."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

TELEMETRY = {
    "sm_clock_mhz": sa.Integer(),
    "memory_clock_mhz": sa.Integer(),
    "temperature_c": sa.Integer(),
    "throttle_reasons": sa.BigInteger(),
    "other_processes": sa.Integer(),
}


def upgrade() -> None:
    for name, type_ in TELEMETRY.items():
        op.add_column("user_trial", sa.Column(name, type_, nullable=True, server_default=sa.null()))
