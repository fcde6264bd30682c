"""The sources of a report: sweeps, winners, and the files that other commands wrote."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktune.cli.explain.ladder_file import FORMAT as LADDER
from blocktune.cli.lab.noise_file import NOISE_FORMAT as NOISE
from blocktune.cli.lab.replay_file import FORMAT as REPLAY
from blocktune.cli.output.json_files import read_document, read_json
from blocktune.cli.output.render import SCHEMA
from blocktune.cli.tune.bench_file import FORMAT as BENCH
from blocktune.db.exchange.document import FORMAT as RESULTS
from blocktune.kernels.files.reading import read_resource
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.miss_file import Miss

if TYPE_CHECKING:
    from blocktune.db.records.records import Best, KernelBest, KernelTrial
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.lab.sweep_file import Sweep
    from blocktune.tuner.profile.counter_file import CounterFile

KINDS = {BENCH: "bench", LADDER: "ladder", REPLAY: "replay", NOISE: "noise"}
"""Of the documents that views are made of, the word for each by its `format`."""


@dataclass(frozen=True, slots=True)
class Document:
    """A file that a command wrote: its name, its kind and what it holds."""

    name: str
    kind: str
    content: dict[str, Any]


@dataclass(slots=True)
class Sources:
    """All that goes into one report.

    shipped: how many of the winners, the last ones, come with the package.
    kernels: the winners of autotuned kernels, with the trials of each.
    misses: how often the user's own calls found no measurement, by device and shape.
    counters: what Nsight Compute counted, by the name of the file.
    before: the winners of another store to compare with, None for no comparison.
    """

    sweeps: "list[Sweep]" = field(default_factory=list)
    winners: "list[Best]" = field(default_factory=list)
    shipped: int = 0
    documents: list[Document] = field(default_factory=list)
    kernels: "list[tuple[KernelBest, list[KernelTrial]]]" = field(default_factory=list)
    misses: Mapping[Miss, int] = field(default_factory=dict)
    counters: "dict[str, CounterFile]" = field(default_factory=dict)
    before: "list[Best] | None" = None

    def documents_of_kind(self, kind: str) -> list[Document]:
        """Return the documents of one kind, the newest first."""
        found = [document for document in self.documents if document.kind == kind]
        return sorted(found, key=lambda each: (str(each.content.get("created_at", "")), each.name), reverse=True)

    @property
    def devices(self) -> "list[DeviceSpec]":
        """The devices of winners and sweeps, each once."""
        found = [best.device for best in self.winners] + [sweep.device for sweep in self.sweeps]
        return list({device.key: device for device in found}.values())

    @property
    def shapes(self) -> list[AttentionShape]:
        """The shapes of winners, sweeps and benches, each once."""
        found = [best.shape for best in self.winners] + [sweep.shape for sweep in self.sweeps]
        rows = [row for document in self.documents_of_kind("bench") for row in document.content["rows"]]
        return list(dict.fromkeys([*found, *(AttentionShape.from_json(row["shape"]) for row in rows)]))

    def add_shipped_winners(self, winners: "Sequence[Best]") -> None:
        """Add the winners that come with the package, after all others."""
        self.winners += winners
        self.shipped = len(winners)

    def add(self, place: str | Path) -> None:
        """Read a file, every file of a folder that a report can show, or the database at a URL.

        Raises:
            UsageError: the place does not exist, has nothing to show, or a file is not what it seems to be.
        """
        if isinstance(place, str) and "://" in place:
            self._add_results(place)
            return
        place = Path(place)
        files = _files_in(place) if place.is_dir() else [place]
        if not files:
            raise UsageError(
                f"{place} holds neither sweeps nor JSON files of other commands. `tune lab sweeps FOLDER` writes "
                "sweeps, `tune bench --out FILE` a bench."
            )
        for path in files:
            self._add_file(path, named=path == place)

    def _add_file(self, path: Path, *, named: bool) -> None:
        """Read one file; of a folder's files, those of other formats are passed over. What is no JSON is a database."""
        from blocktune.tuner.lab.sweep_file import SUFFIX, load_sweep
        from blocktune.tuner.profile.counter_file import SUFFIX as COUNTERS
        from blocktune.tuner.profile.counter_file import CounterFile

        if path.name.endswith(SUFFIX):
            self.sweeps.append(load_sweep(path))
            return
        if path.name.endswith(COUNTERS):
            self.counters[path.name] = CounterFile.read(path)
            return
        form = _format_of(path) if path.suffix == ".json" else RESULTS
        if form == RESULTS:
            self._add_results(path)
        elif form in KINDS:
            self.documents.append(Document(path.name, KINDS[form], read_document(path, KINDS[form], form, SCHEMA)))
        elif named:
            raise UsageError(
                f"{path} is not a file that a report shows: sweeps, exports, and what `tune bench`, `ladder`, "
                "`replay` and `noise` write with `--out`. Name another file."
            )

    def _add_results(self, path: str | Path) -> None:
        from blocktune.db.records.records import of_attention
        from blocktune.db.sources import read_results
        from blocktune.tuner.lab.sweep_file import sweeps_of

        found = read_results(path, trials=True)
        self.winners += of_attention(found.bests)
        self.sweeps += sweeps_of(of_attention(found.trials))


def read_sources(places: Iterable[str | Path]) -> Sources:
    """Return everything that these files and folders hold."""
    sources = Sources()
    for place in places:
        sources.add(place)
    return sources


def shipped_counters() -> "dict[str, CounterFile]":
    """Return the counters that are part of the package, by the names of their files."""
    from importlib import resources

    from blocktune.runtime.store_reader.export_file import SHIPPED_RESULTS
    from blocktune.tuner.profile.counter_file import SUFFIX, CounterFile

    entries = sorted(resources.files(SHIPPED_RESULTS).iterdir(), key=lambda entry: entry.name)
    return {
        entry.name: CounterFile.parse(read_resource(entry), entry.name)
        for entry in entries
        if entry.name.endswith(SUFFIX)
    }


def shipped_documents() -> list[Document]:
    """Return the documents that are part of the package."""
    from importlib import resources

    from blocktune.runtime.store_reader.export_file import SHIPPED_RESULTS

    found: list[Document] = []
    for entry in sorted(resources.files(SHIPPED_RESULTS).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            content = json.loads(read_resource(entry))
            if content.get("format") in KINDS:
                found.append(Document(entry.name, KINDS[content["format"]], content))
    return found


def _files_in(folder: Path) -> Sequence[Path]:
    """Return the sweeps, counters and JSON files of a folder and of those in it, by name."""
    return sorted(
        path for path in folder.rglob("*") if path.name.endswith((".sweep.json.gz", ".json", ".counters.csv"))
    )


def _format_of(path: Path) -> str | None:
    """Return the `format` that a JSON file names.

    Raises:
        UsageError: it cannot be read, or is no JSON object.
    """
    content = read_json(path)
    form = content.get("format") if isinstance(content, dict) else None
    return form if isinstance(form, str) else None
