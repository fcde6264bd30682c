"""The output of `tune run` for one shape or call: JSON, all that was found, or six lines."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blocktune.cli.output.render import print_json, say
from blocktune.cli.shared.lookup import Answer, look_up
from blocktune.cli.shared.summary import show_short, show_winner
from blocktune.cli.tune.known_result import show_known_result
from blocktune.cli.tune.report_text import show_report
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.measure.device_choice import is_present

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore
    from blocktune.tuner.compile_server.background import Compiler
    from blocktune.tuner.search.report import TuningReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutput:
    """How a search is shown.

    as_json, verbose: as the flags say. assumed: sizes that were not given. db: place of the store as the user gave it.
    """

    as_json: bool
    verbose: bool
    assumed: str
    db: str | None

    def show_known(self, known: Answer, compiler: "Compiler") -> None:
        """Print a measurement before the search for a device that is not here: it is used instead of a prediction."""
        if self.verbose and not self.as_json:
            show_known_result(known, compiler)
        elif not self.as_json:
            show_short(known, self.assumed)

    def show_end(self, report: "TuningReport", known: Answer | None, store: "ResultStore") -> None:
        """Print what came of the search."""
        best = report.best
        if self.as_json:
            print_json(report.to_json() | {"known": None if known is None else known.to_json()})
        elif self.verbose:
            show_report(report, store.label)
            if known is not None:
                say("`attention` uses the measured config above, not this prediction; so does `tune best`")
        elif known is None and isinstance(best.shape, AttentionShape) and not is_present(best.device):
            show_short(look_up(store, self.db, best.device, best.shape), self.assumed)
        elif known is None:
            show_winner(best, report.predicted_us, self.assumed)
