"""The view `dispatch` tells the power limit too. The tables stay as they are."""

from alembic import op

revision = "0003"
down_revision = "0002"

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
    environment.power_limit_w AS power_limit_w
FROM best
JOIN device ON device.id = best.device_id
JOIN shape ON shape.id = best.shape_id
JOIN config ON config.id = best.config_id
JOIN kernel ON kernel.id = best.kernel_id
JOIN environment ON environment.id = best.environment_id
"""


def upgrade() -> None:
    op.execute("DROP VIEW dispatch")
    op.execute(DISPATCH_VIEW)
