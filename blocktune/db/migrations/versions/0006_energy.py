"""Trials and winners tell the energy of a launch, and winners by what they were chosen."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

ENERGIES = {"trial": ["energy_mj"], "best": ["energy_mj", "default_energy_mj", "paper_energy_mj"]}


def upgrade() -> None:
    for table, names in ENERGIES.items():
        for name in names:
            op.add_column(table, sa.Column(name, sa.Double(), nullable=True, server_default=sa.null()))
    op.add_column("best", sa.Column("objective", sa.String(length=16), nullable=False, server_default="time"))
