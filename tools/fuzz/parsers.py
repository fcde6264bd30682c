"""What reads what strangers may have written, as functions of bytes, each with inputs to begin with.

A parser ends well if it raises an error of ours or none. Its message is short, and holds nothing that a terminal would
obey.
"""

import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blocktune.cli.shared.shapes_file import flags_of_file, sizes_of_file
from blocktune.db.exchange.document import document_from, frozen_document, load_document
from blocktune.db.exchange.importing import records_in
from blocktune.kernels.files.checksums import CHECKSUM
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.files.reading import json_value
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.store_reader.export_file import autotuned_rows_in_file, exported_checksum, rows_in_file, seal_of
from blocktune.runtime.store_reader.usable_rows import usable_rows
from blocktune.tuner.lab.sweep_file import load_sweep, save_sweep, sweeps_of
from tests.support.stores.sample_records import sample_trials, winner
from tools.fuzz.commands import command_seeds, read_command
from tools.fuzz.requests import read_request, request_seeds

MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True)
class Parser:
    """What is fuzzed.

    reads: the ways to read an input. seeds: returns sound inputs, and some that are nearly so.
    """

    reads: tuple[Callable[[bytes], object], ...]
    seeds: Callable[[], list[bytes]]


def judge(parser: Parser, data: bytes) -> None:
    """Let a parser read an input.

    Raises:
        AssertionError: it refused it with a message that is too long, or that a terminal would obey.
        Exception: what it should not have raised.
    """
    for read in parser.reads:
        try:
            read(data)
        except BlocktuneError as error:
            message = str(error)
            assert len(message) <= MAX_MESSAGE, f"{len(message)} characters"
            assert all(sign.isprintable() or sign in "\n\t" for sign in message), f"control signs: {message!r}"


@cache
def _folder() -> Path:
    """Return a folder in memory for the inputs of what reads files."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))


def _from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """Return what reads an input as a file of this name."""

    def read_bytes(data: bytes) -> None:
        path = _folder() / name
        path.write_bytes(data)
        read(path)

    return read_bytes


def _read_with_seal(data: bytes) -> None:
    """Read a results file as its author would have sealed it."""
    path = _folder() / "a.json"
    path.write_bytes(_seal(data))
    rows_in_file(path)


def _seal(data: bytes) -> bytes:
    """Return a document with the checksums and the seal that its content asks for, as far as it is one."""
    try:
        document = json_value(data)
        for best in document["bests"]:
            device = DeviceSpec.from_json(document["device"])
            environment = document["environments"][best["environment"]]
            best[CHECKSUM] = exported_checksum(best, device.key, environment)
        return json.dumps(document | {"sha256": seal_of(document)}).encode()
    except (BlocktuneError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return data


def _read_rows(data: bytes) -> None:
    """Read rows as production does, whatever a store holds."""
    try:
        rows = json_value(data)
    except (ValueError, RecursionError):
        return
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        usable_rows(rows, winner().device, where="a store")


def _read_sweep(data: bytes) -> None:
    """Read a sweep from the text inside its compressed file."""
    path = _folder() / "a.sweep.json.gz"
    path.write_bytes(gzip.compress(data, 1))
    load_sweep(path)


def _exports() -> list[bytes]:
    best = winner()
    documents = [document_from(best.device, [best], trials) for trials in (None, sample_trials(2))]
    for row in [*documents[1]["bests"], *documents[1]["trials"]]:
        del row[CHECKSUM]  # which a row that was changed on purpose has not
    return [canonical_text(document).encode() for document in documents]


def _frozen() -> list[bytes]:
    best = winner()
    return [canonical_text(frozen_document(best.device, bests)).encode() for bests in ([best], [])]


def _rows() -> list[bytes]:
    path = _folder() / "seed.json"
    path.write_bytes(_frozen()[0])
    return [json.dumps([dict(row) for row in rows_in_file(path)]).encode(), b"[]", b"[{}]"]


def _sweeps() -> list[bytes]:
    (sweep,) = sweeps_of(sample_trials(3))
    return [gzip.decompress(save_sweep(sweep, _folder()).read_bytes())]


def _shapes() -> list[bytes]:
    tables = (
        "[prefill]\nseq = 8192\ndim = 128\ncausal = true\n",
        '[decode]\nseq = 1\nseq-k = [4096, 16384]\ndim = 128\nkv-heads = 8\ndtype = "fp16"\nfeatures = "window=5:5"\n',
        "[[a]]\nseq = 1\ndim = 64\n[[a]]\nM = [1, 2.5, true]\nname = 'x'\n",
    )
    return [table.encode() for table in tables]


PARSERS = {
    "exports": Parser((_from_file("a.json", lambda path: records_in(load_document(path))),), _exports),
    "frozen": Parser(
        (_from_file("a.json", rows_in_file), _from_file("a.json", autotuned_rows_in_file), _read_with_seal), _frozen
    ),
    "rows": Parser((_read_rows,), _rows),
    "sweeps": Parser((_read_sweep,), _sweeps),
    "shapes": Parser((_from_file("a.toml", flags_of_file), _from_file("a.toml", sizes_of_file)), _shapes),
    "requests": Parser((read_request,), request_seeds),
    "commands": Parser((read_command,), command_seeds),
}
