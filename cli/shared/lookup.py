"""`tune best`: the config that a call of this shape would get, where it comes from, and what was better or worse."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import typer

from blocktune.cli.results.store import existing_store
from blocktune.cli.shared.options import AsJson, Database, DeviceName, ShapeFlags, with_shape_flags
from blocktune.cli.shared.render import note, print_json, print_table
from blocktune.cli.shared.winners import (
    COLUMNS,
    Predictions,
    config_json,
    origin_text,
    predictions,
    provenance,
    winner_json,
    winner_rows,
)
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.db.records.records import Best
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.selection.fallback import Candidate
    from blocktune.kernels.stored.sources import ConfigSource
    from blocktune.kernels.values.shape import AttentionShape


@with_shape_flags
def best(flags: ShapeFlags, device: DeviceName = None, db: Database = None, as_json: AsJson = False) -> None:
    """Show the best known config for a shape.

    It answers as the dispatcher does: from the database, a neighbouring shape, the shipped results or the model.
    Ends with exit code 3 when no result is near, and says what would run then.

    \b
    tune best --seq 8192 --dim 64
    tune best --seq 8192 --dim 64 --causal --device h200 --json
    """
    shape, spec = flags.shape(), choose_device(device)
    with existing_store(db) as store:
        answer = look_up(store, db, spec, shape)
    if as_json:
        print_json(answer.to_json())
    else:
        _show(answer, flags.assumed())
    if not answer.is_tuned:
        raise NoFeasibleConfigError(
            f"No result for {shape.label} on {spec.name} or near it. Make one: {_command(flags, device)}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the ladder says about a shape, and the stored winner behind it where there is one."""

    device: "DeviceSpec"
    shape: "AttentionShape"
    candidate: "Candidate | None"
    winner: "Best | None"
    predicted: Predictions
    passed_over: tuple[str, ...]

    @property
    def rung(self) -> str:
        return "sdpa" if self.candidate is None else str(self.candidate.rung)

    @property
    def is_tuned(self) -> bool:
        return self.rung not in ("sdpa", "default")

    def to_json(self) -> dict[str, Any]:
        found = self.candidate
        data = {} if self.winner is None else winner_json(self.winner)
        return data | {
            "device": self.device.to_json(),
            "shape": self.shape.to_json(),
            "rung": self.rung,
            "best": None if found is None else config_json(found.config, **self._facts(found)),
            "tuned_for": found.tuned_for.to_json() if found is not None and found.tuned_for is not None else None,
            "passed_over": list(self.passed_over),
        }

    def _facts(self, found: "Candidate") -> dict[str, Any]:
        predicted_us = None if self.winner is None else self.winner.predicted_us
        return {"time_us": found.time_us, "predicted_us": predicted_us, "origin": str(found.origin)}


def look_up(store: "ResultStore | None", db: str | None, device: "DeviceSpec", shape: "AttentionShape") -> Answer:
    """Climbs down the dispatcher's ladder over the store, where there is one, and the shipped results.

    Args:
        store: what `existing_store(db)` opened.
        db: its place as the user gave it.
        device: to answer for.
        shape: to answer for.
    """
    from blocktune.db.tables.location import StoreTarget
    from blocktune.kernels.stored.sources import JsonConfigs, SqliteConfigs

    winners = list(_shipped_winners())
    layers: list[ConfigSource] = [JsonConfigs()]
    if store is not None:
        path = StoreTarget.of(db).path
        layers.insert(0, store if path is None else SqliteConfigs(path))
        winners = [*store.bests(), *winners]
    candidate, passed_over = _climb_down(layers, device, shape)
    winner = None if candidate is None else _winner_behind(candidate, winners)
    predicted = {} if store is None or winner is None else predictions(store, winner)
    return Answer(device, shape, candidate, winner, predicted, passed_over)


def _climb_down(
    layers: "list[ConfigSource]", device: "DeviceSpec", shape: "AttentionShape"
) -> tuple["Candidate | None", tuple[str, ...]]:
    """The first config that fits, and why nothing better did."""
    from blocktune.kernels.selection.fallback import Candidate, ConfigTable, climb_down
    from blocktune.kernels.stored.sources import LayeredConfigs

    passed_over: list[str] = []
    for step in climb_down(ConfigTable(LayeredConfigs(tuple(layers)).configs(device)), shape, device.limits):
        if isinstance(step, Candidate):
            return step, tuple(passed_over)
        passed_over.append(str(step))
    return None, tuple(passed_over)


def _shipped_winners() -> Iterator["Best"]:
    """The winners in the exports that are part of the package; its other files are none."""
    from importlib.resources import files

    from blocktune.db.exchange.document import FORMAT
    from blocktune.db.exchange.importing import records_from
    from blocktune.kernels.stored.export_file import SHIPPED_RESULTS

    for entry in files(SHIPPED_RESULTS).iterdir():
        document = json.loads(entry.read_text(encoding="utf-8")) if entry.name.endswith(".json") else {}
        if document.get("format") == FORMAT:
            yield from records_from(document)[0]


def _winner_behind(candidate: "Candidate", winners: Iterable["Best"]) -> "Best | None":
    """The winner that the candidate was read from, which knows more about it; None for a default."""
    wanted = (candidate.tuned_for, candidate.config, candidate.time_us)
    return next((winner for winner in winners if (winner.shape, winner.config, winner.time_us) == wanted), None)


def _show(answer: Answer, assumed: str) -> None:
    from blocktune.kernels.selection.explanation import Explanation

    typer.echo(f"{answer.shape.label} on {answer.device.name}")
    if assumed:
        note(assumed)
    for reason in answer.passed_over:
        note(f"not {reason}")
    if answer.candidate is None:
        typer.echo("PyTorch's scaled_dot_product_attention would compute this shape")
        return
    typer.echo(f"{answer.rung}: {Explanation.of(answer.candidate, answer.shape).reason}")
    if answer.winner is None:
        typer.echo(answer.candidate.config.label)
        return
    print_table(COLUMNS, winner_rows(answer.winner, answer.predicted))
    typer.echo(f"\n{origin_text(answer.winner)}, on {provenance(answer.winner)}")


def _command(flags: ShapeFlags, device: str | None) -> str:
    """The command that would tune this shape."""
    given = {
        field.name.replace("_", "-"): getattr(flags, field.name)
        for field in fields(flags)
        if getattr(flags, field.name) != field.default
    }
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items()]
    return " ".join(["tune run", *words, *([f"--device {device}"] if device else [])])
