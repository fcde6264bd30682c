"""Rows of trials and winners as records."""

from collections.abc import Mapping

from blocktune.db.records.bounds import require_sound_best, require_sound_trial
from blocktune.db.records.linked_rows import LinkedRow, links_of
from blocktune.db.records.records import AnyBest, AnyTrial, Best, Outcome, Record, Telemetry, Trial
from blocktune.db.records.row_checksums import record_checksum, served_checksum
from blocktune.db.records.row_values import (
    IMPORTED,
    device_of,
    environment_of,
    is_attention,
    parsed_config,
    parsed_parameters,
    parsed_problem,
    parsed_shape,
    require_repeated,
)
from blocktune.db.tables.models import (
    BestRow,
    ConfigRow,
    ShapeRow,
    TrialRow,
)
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.column_kinds import record_values
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig


def require_links(row: TrialRow | BestRow | LinkedRow) -> None:
    """Check that the rows that a row refers to are there: one that leads nowhere must not vanish in silence.

    Raises:
        UsageError: one is not.
    """
    for name in links_of(row.__table__):
        if getattr(row, name) is None and getattr(row, f"{name}_id") is not None:
            raise UsageError(f"Row {row.id} of `{row.__tablename__}` refers to a {name} that does not exist.")


def require_as_written(record: Record, checksum: str | None, documents: Mapping[str, str] | None = None) -> None:
    """Check that a record is what was stored. A row of an older blocktune may have no checksum, and is believed.

    Args:
        record: what was made of the row.
        checksum: of the row.
        documents: the texts that fields of the record were made of. Mostly they are as blocktune writes them today,
            and need not be written again to be compared.

    Raises:
        UsageError: it is not.
    """
    if checksum is None or (documents and record_checksum(record, documents) == checksum):
        return
    if record_checksum(record) != checksum:
        raise UsageError(
            "The row, or a row that it refers to, was changed after it was written: its content does not match its "
            "checksum."
        )


def trial_of(row: TrialRow | LinkedRow) -> AnyTrial:
    """Return the record of this row.

    Raises:
        one of UNREADABLE: a value is out of range, or the row is not as it was written.
    """
    trial = unverified_trial(row)
    require_as_written(trial, row.checksum, _documents_of(row, {"shape": row.shape, "config": row.config}))
    return trial


def whole_trial(row: TrialRow) -> AnyTrial:
    """Return the record of this row, whose kernel's row has the name that its config says. Raises the errors of
    `trial_of`."""
    trial = trial_of(row)
    require_repeated(row.kernel, {"name": trial.config.kernel})
    return trial


def whole_best(row: BestRow) -> AnyBest:
    """Return the record of this row as `whole_trial` does; production has to find it sound, too."""
    best = best_of(row)
    require_repeated(row.kernel, {"name": best.config.kernel})
    if row.checksum is not None:
        require_repeated(row, {"served_checksum": served_checksum(best, view_documents(row))})
    return best


def view_documents(row: BestRow | LinkedRow) -> dict[str, str]:
    """Return the texts of a winner's row that the view `dispatch` repeats, as they were written."""
    return {"shape": row.shape.document, "config": row.config.document}


def unverified_trial(row: TrialRow | LinkedRow) -> AnyTrial:
    """Return the record of this row, whatever its checksum is. Raises the errors of `trial_of`."""
    require_links(row)
    compiled = record_values(KernelResources, row)
    imported = row.gpu_uuid == IMPORTED
    trial = Trial(
        device=device_of(row.device, None if imported else row.gpu_uuid),
        environment=environment_of(row.environment),
        shape=_shape_of(row),
        config=_config_of(row, row.config),
        kernel_hash=row.kernel.source_hash,
        outcome=Outcome(row.outcome),
        resources=None if compiled["registers"] is None else KernelResources(**compiled),
        telemetry=Telemetry(**record_values(Telemetry, row)),
        created_at=row.created_at,
        imported=imported,
        **record_values(Trial, row),
    )
    require_sound_trial(trial)
    return trial


def best_of(row: BestRow | LinkedRow) -> AnyBest:
    """Return the record of this row.

    Raises:
        one of UNREADABLE: a value is out of range, or the row is not as it was written.
    """
    best = unverified_best(row)
    linked = {"shape": row.shape, "config": row.config, "default": row.default_config, "paper": row.paper_config}
    require_as_written(best, row.checksum, _documents_of(row, linked))
    return best


def unverified_best(row: BestRow | LinkedRow) -> AnyBest:
    """Return the record of this row, whatever its checksum is. Raises the errors of `best_of`."""
    require_links(row)
    best = Best(
        device=device_of(row.device, row.gpu_uuid),
        environment=environment_of(row.environment),
        shape=_shape_of(row),
        config=_config_of(row, row.config),
        kernel_hash=row.kernel.source_hash,
        origin=Origin(row.origin),
        default=None if row.default_config is None else _config_of(row, row.default_config),
        paper=None if row.paper_config is None else _config_of(row, row.paper_config),
        created_at=row.created_at,
        **record_values(Best, row),
    )
    require_sound_best(best)
    return best


def _shape_of(row: TrialRow | BestRow | LinkedRow) -> AttentionShape | KernelProblem:
    if is_attention(row.shape):
        return parsed_shape(row.shape.document)
    return KernelProblem(row.kernel.name, parsed_problem(row.shape.document))


def _config_of(row: TrialRow | BestRow | LinkedRow, config: ConfigRow) -> KernelConfig | LaunchConfig:
    if is_attention(row.shape):
        return parsed_config(config.document)
    return parsed_parameters(row.kernel.name, config.document)


def _documents_of(
    row: TrialRow | BestRow | LinkedRow, linked: Mapping[str, ShapeRow | ConfigRow | None]
) -> dict[str, str]:
    """Return the texts that fields of a record are made of. Those of autotuned kernels lack the kernel's name."""
    if not is_attention(row.shape):
        return {}
    return {name: target.document for name, target in linked.items() if target is not None}
