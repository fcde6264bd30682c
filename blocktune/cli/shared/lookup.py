"""The answer of the dispatcher's ladder for a shape."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.render import print_table, say
from blocktune.cli.output.winners import (
    COLUMNS,
    Predictions,
    config_json,
    origin_text,
    predictions,
    provenance,
    winner_json,
    winner_rows,
)
from blocktune.db.records.records import problem_json
from blocktune.kernels.files.reading import read_resource
from blocktune.tuner.cost.bands import predicted_json

if TYPE_CHECKING:
    from blocktune.db.records.records import Best
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.runtime.selection.ladder import Candidate, Rejection
    from blocktune.runtime.store_reader.sources import ConfigSource
    from blocktune.runtime.store_reader.tuned_config import TunedConfig


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the ladder for a shape, and the stored winner that it comes from, where there is one.

    is_shipped: that winner is of the results that ship with the package, not of the user's own.
    """

    device: "DeviceSpec"
    shape: "AttentionShape"
    candidate: "Candidate | None"
    winner: "Best | None"
    is_shipped: bool
    predicted: Predictions
    passed_over: tuple[str, ...]
    pytorchs: str | None
    """Why a call gets PyTorch's kernel all the same; None where it does not."""

    @property
    def rung(self) -> str:
        return "sdpa" if self.candidate is None else str(self.candidate.rung)

    @property
    def is_tuned(self) -> bool:
        return self.rung not in ("sdpa", "default", "expected")

    @property
    def is_measured(self) -> bool:
        return self.is_tuned and self.rung != "predicted"

    def to_json(self) -> dict[str, Any]:
        found = self.candidate
        data = {} if self.winner is None else winner_json(self.winner, self.predicted)
        return data | {
            "device": self.device.to_json(),
            "shape": problem_json(self.shape),
            "rung": self.rung,
            "source": None if self.winner is None else "shipped" if self.is_shipped else "database",
            "best": None if found is None else config_json(found.config, **self._facts(found)),
            "tuned_for": problem_json(found.tuned_for) if found is not None and found.tuned_for is not None else None,
            "passed_over": list(self.passed_over),
            "pytorch": self.pytorchs,
        }

    def _facts(self, found: "Candidate") -> dict[str, Any]:
        winner = self.winner
        predicted_us = None if winner is None else winner.predicted_us
        return {
            "time_us": found.time_us,
            "energy_mj": None if winner is None else winner.energy_mj,
            **predicted_json(predicted_us, found.config.kernel, self.shape, self.device),
            "origin": str(found.origin),
        }


@dataclass(frozen=True, slots=True)
class _NearConfigs:
    """The recommendation of a server for one shape: it has many more that no source would take."""

    store: "ResultStore"
    shape: "AttentionShape"

    def configs(self, device: "DeviceSpec") -> "list[TunedConfig]":
        """Return the winners on this device that the ladder may take for the shape."""
        from blocktune.runtime.selection.near_shapes import distance, representative
        from blocktune.runtime.store_reader.provenance import MAX_NEIGHBOURS

        shapes = (self.shape, representative(self.shape))
        return self.store.configs_near(device, shapes, distance, MAX_NEIGHBOURS + 1)


def look_up(store: "ResultStore | None", db: str | None, device: "DeviceSpec", shape: "AttentionShape") -> Answer:
    """Find the first source of the dispatcher over the store, where there is one, and the shipped results.

    Args:
        store: what `existing_store(db)` opened.
        db: its place as the user gave it.
        device: to answer for.
        shape: to answer for.
    """
    from blocktune.db.tables.location import StoreTarget
    from blocktune.runtime.store_reader.sources import JsonConfigs, SqliteConfigs

    layers: list[ConfigSource] = [JsonConfigs()]
    if store is not None:
        path = StoreTarget.of(db).path
        layers.insert(0, _NearConfigs(store, shape) if path is None else SqliteConfigs(path))
    candidate, passed_over, pytorchs = _climb_down(layers, device, shape)
    own = None
    if store is not None and candidate is not None and candidate.tuned_for is not None:
        own = _winner_behind(candidate, store.bests(shape=candidate.tuned_for))
    winner = own or _winner_behind(candidate, shipped_winners())
    predicted = {} if store is None or winner is None else predictions(store, winner)
    return Answer(device, shape, candidate, winner, own is None, predicted, passed_over, pytorchs)


def show_answer(answer: Answer) -> None:
    """Print which source answers and why, and the winner with its rivals."""
    from blocktune.runtime.selection.reasons import explain_candidate

    if answer.candidate is None:
        say("PyTorch's scaled_dot_product_attention would compute this shape")
        return
    reason = explain_candidate(answer.candidate, answer.shape, device=answer.device).reason
    if answer.pytorchs is not None:
        say(f"A call gets PyTorch's attention: {answer.pytorchs}. The best known config of ours:")
    say(f"{answer.rung}: {reason}{'; this result ships with blocktune' if answer.winner and answer.is_shipped else ''}")
    if answer.winner is None:
        say(answer.candidate.config.label)
        return
    print_table(COLUMNS, winner_rows(answer.winner, answer.predicted))
    say(f"\n{origin_text(answer.winner)}, on {provenance(answer.winner)}")


def _climb_down(
    layers: "list[ConfigSource]", device: "DeviceSpec", shape: "AttentionShape"
) -> tuple["Candidate | None", tuple[str, ...], str | None]:
    """Return the first config of ours that fits, why nothing better did, and why a call gets PyTorch's kernel."""
    from blocktune.runtime.selection.fallback import ConfigTable, climb_down
    from blocktune.runtime.selection.ladder import Candidate, Rejection
    from blocktune.runtime.selection.pytorch_rival import rival_on
    from blocktune.runtime.selection.untuned import shipped_untuned
    from blocktune.runtime.store_reader.sources import LayeredConfigs

    passed_over: list[str] = []
    rows = LayeredConfigs(tuple(layers)).configs(device)
    table = ConfigTable(rows, partial(shipped_untuned, device), rival_on(device))
    first = next((step for step in climb_down(table, shape, device.limits) if _ends(step)), None)
    pytorchs = first.reason if isinstance(first, Rejection) else None
    for step in climb_down(table, shape, device.limits, competes=False):
        if isinstance(step, Candidate):
            return step, tuple(passed_over), pytorchs
        passed_over.append(str(step))
    return None, tuple(passed_over), None


def _ends(step: "Candidate | Rejection") -> bool:
    """Return whether a call looks no further."""
    from blocktune.runtime.selection.ladder import Candidate, Rung

    return isinstance(step, Candidate) or step.rung is Rung.SDPA


def shipped_winners() -> Iterator["Best"]:
    """Yield the winners in the exports that are part of the package; its other files are none."""
    from importlib.resources import files

    from blocktune.db.exchange.document import FORMAT
    from blocktune.db.exchange.importing import records_from
    from blocktune.runtime.store_reader.export_file import SHIPPED_RESULTS

    for entry in files(SHIPPED_RESULTS).iterdir():
        document = json.loads(read_resource(entry)) if entry.name.endswith(".json") else {}
        if document.get("format") == FORMAT:
            yield from records_from(document)[0]


def _winner_behind(candidate: "Candidate | None", winners: Iterable["Best"]) -> "Best | None":
    """Return the winner that the candidate was read from, with today's rivals; None for a default."""
    from blocktune.db.rivals import with_todays_rivals

    if candidate is None:
        return None
    wanted = (candidate.tuned_for, candidate.config, candidate.time_us)
    found = (winner for winner in winners if (winner.shape, winner.config, winner.time_us) == wanted)
    return next(map(with_todays_rivals, found), None)
