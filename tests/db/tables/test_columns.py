"""A measured value is declared once: tables, bounds, documents, sweep files and worker answers follow."""

import os
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_origin

import pytest
from sqlalchemy import JSON, Double, Integer, String

from blocktune.db.records.bounds import require_sound_value
from blocktune.db.records.records import Best, Telemetry, Trial
from blocktune.db.tables.models import measured_columns
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.column_kinds import (
    Column,
    Derived,
    Kind,
    Prose,
    Real,
    Several,
    Whole,
    Word,
    columns_of,
    plain_values,
    record_values,
)
from blocktune.kernels.values.errors import UsageError

WORD = Word(8, "[a-z]{1,8}", "a small word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A record with columns of several kinds, and a field that is no column."""

    label: str
    voltage_v: Annotated[float | None, Real(0, 2, decimals=2)] = None
    errors: Annotated[int, Whole()] = 0
    rails: Annotated[tuple[str, ...], Several(WORD, 3), Derived()] = ()


def test_columns_are_the_annotated_fields_in_their_order() -> None:
    assert columns_of(Reading) == (
        Column("voltage_v", Real(0, 2, decimals=2), optional=True, derived=False),
        Column("errors", Whole(), optional=False, derived=False),
        Column("rails", Several(WORD, 3), optional=False, derived=True),
    )
    assert [column.decimals for column in columns_of(Reading)] == [2, None, None]


def test_values_go_to_a_row_and_come_back() -> None:
    reading = Reading(label="a", voltage_v=0.75, errors=2, rails=("core", "memory"))
    plain = plain_values(reading)
    assert plain == {"voltage_v": 0.75, "errors": 2, "rails": ["core", "memory"]}
    row = type("Row", (), plain)()
    assert Reading(label="a", **record_values(Reading, row)) == reading


def test_columns_of_a_table_have_the_kinds_of_the_record() -> None:
    found = {name: (type(made.column.type), made.column.nullable) for name, made in measured_columns(Reading).items()}
    assert found == {"voltage_v": (Double, True), "errors": (Integer, False), "rails": (JSON, False)}
    assert all(made.column.nullable for made in measured_columns(Reading, optional=True).values())
    assert isinstance(measured_columns(KernelResources)["code_sha256"].column.type, String)


@pytest.mark.parametrize(
    ("kind", "sound", "broken"),
    [
        (Real(0, 2), (0, 0.5, 2), (-0.1, 2.1, float("nan"), True, "1", None)),
        (Whole(1, 3), (1, 3), (0, 4, 2.0, True, None)),
        (WORD, ("", "a b", "x" * 8), ("x" * 9, "\x1b[2J", 3, None)),
        (Prose(9), ("two\nlines",), ("x" * 10, 3, None)),
        (Several(Real(0, 2), 2), ((), (1.0, 2)), ((3.0,), (1, 1, 1), ("1",), [1.0], None)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Kind) else "",
)
def test_a_value_is_of_its_kind_and_in_its_range(kind: Kind, sound: tuple[Any, ...], broken: tuple[Any, ...]) -> None:
    for value in sound:
        require_sound_value(kind, "value", value)
    for value in broken:
        with pytest.raises(UsageError, match="value="):
            require_sound_value(kind, "value", value)


@pytest.mark.parametrize("record_type", [Trial, Best, Telemetry, KernelResources])
def test_every_number_of_a_record_is_a_column(record_type: type[Any]) -> None:
    """A number without a column would be neither stored nor exported."""
    numbers = {int, float, int | None, float | None, tuple[float, ...], tuple[str, ...]}
    assert columns_of(record_type)
    left_out = [
        field.name for field in fields(record_type) if field.type in numbers and get_origin(field.type) is not Annotated
    ]
    assert left_out == []


ANOTHER_FIELD = """
import importlib.util, json, sqlite3, sys
from dataclasses import replace
from pathlib import Path

name, folder = "blocktune.db.tables.columns", Path(sys.argv[1])
spec = importlib.util.find_spec(name)
line = "    other_processes: Annotated[int | None, PROCESSES] = None\\n"
source = Path(spec.origin).read_text()
assert line in source
added = "    fan_percent: Annotated[float | None, Real(0, 100, decimals=1)] = None\\n"
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
exec(compile(source.replace(line, line + added), spec.origin, "exec"), module.__dict__)

import pytest
from blocktune.db.exchange.document import document_from
from blocktune.db.exchange.importing import records_from
from blocktune.db.records.records import Outcome, Telemetry
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import BlocktuneError, ImportRejectedError
from blocktune.tuner.lab.sweep_file import load_sweep, save_sweep, sweeps_of
from tests.support.models import landscape

ResultStore.open(folder / "b.db").close()
with sqlite3.connect(folder / "b.db") as connection:  # what its migration would do
    connection.execute("ALTER TABLE trial ADD COLUMN fan_percent DOUBLE")
config = landscape.SPACE.feasible[0]
trial = landscape.SUBJECT.trial(
    config, Outcome.OK, kernel_hash="0" * 16, time_us=10.0, telemetry=Telemetry(fan_percent=43.21)
)

with ResultStore.open(folder / "b.db") as store:
    store.record(trial)
    (stored,) = store.trials()
    assert stored.telemetry.fan_percent == 43.21
    with pytest.raises(BlocktuneError, match="fan_percent=101"):
        store.record(replace(trial, telemetry=Telemetry(fan_percent=101)))
document = json.loads(json.dumps(document_from(trial.device, [], [trial])))
assert records_from(document)[1][0].telemetry.fan_percent == 43.21
document["trials"][0]["telemetry"]["fan_percent"] = "fast"
with pytest.raises(ImportRejectedError, match="fan_percent"):
    records_from(document)
assert load_sweep(save_sweep(sweeps_of([trial])[0], folder)).trials[0].telemetry.fan_percent == 43.2
"""


def test_a_field_that_is_declared_is_stored_bounded_exported_imported_and_swept(tmp_path: Path) -> None:
    """One line in db/tables/columns.py, and the column in the database, are all that another field needs."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-P", "-c", ANOTHER_FIELD, str(tmp_path)]
    subprocess.run(command, check=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
