"""How Alembic reaches the store. Alembic runs this file; it is not a module to import.

`blocktune.db.tables.schema` hands over the connection, whose transaction spans all migrations, so that a killed upgrade
leaves the old schema.
"""

from alembic import context

from blocktune.db.tables.models import Base
from blocktune.db.tables.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
