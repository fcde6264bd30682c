"""Rows have checksums, and the views of production tell them. db/records/filling.py gives older rows theirs."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

CHECKSUMS = {
    "device": ["checksum"],
    "trial": ["checksum"],
    "best": ["checksum", "served_checksum"],
    "user_trial": ["checksum"],
    "user_best": ["checksum", "served_checksum"],
}

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
"""

USER_DISPATCH_VIEW = """
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
    environment.driver AS driver,
    user_best.served_checksum AS checksum
FROM user_best
JOIN device ON device.id = user_best.device_id
JOIN environment ON environment.id = user_best.environment_id
"""


def upgrade() -> None:
    for table, names in CHECKSUMS.items():
        for name in names:
            op.add_column(table, sa.Column(name, sa.String(length=16), nullable=True, server_default=sa.null()))
    op.execute("DROP VIEW dispatch")
    op.execute(DISPATCH_VIEW)
    op.execute("DROP VIEW user_dispatch")
    op.execute(USER_DISPATCH_VIEW)
