"""Winners tell which config each contributed machine found fastest."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("best", sa.Column("votes", sa.JSON(), nullable=False, server_default="[]"))
