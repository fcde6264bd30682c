"""Environments tell the regime: how the GPU worked while it was measured.

What was measured before is `sustained`: finals, which decide, came after a second of load and were three seconds of
load without a rest; candidates came after 50 ms of load, and none of their 25 ms was rested either. The digests stay,
since those of sustained environments leave the regime out.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("environment", sa.Column("regime", sa.String(length=16), nullable=False, server_default="sustained"))
