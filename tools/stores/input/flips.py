"""Files of every kind with one flipped bit: what is read of one is what was written, or it is refused in words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from blocktune.cli.report.sources import Sources
from blocktune.cli.shared.shapes_file import flags_of_file
from blocktune.db import spool
from blocktune.db.exchange.document import export_document, frozen_document, save_document
from blocktune.db.exchange.importing import records_in_file
from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Outcome
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.files.signature import signed
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.autotuned.launches import Kind, Launches, append_launches, read_launches
from blocktune.runtime.selection.miss_file import append_misses, read_misses
from blocktune.runtime.store_reader.export_file import autotuned_rows_in_file, rows_in_file
from blocktune.runtime.store_reader.store_file import SqliteRows
from blocktune.runtime.store_reader.store_views import USER_DISPATCH
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep, save_sweep
from blocktune.tuner.profile.counter_file import CounterFile
from tests.support.stores.frozen_files import BOTH, H200, KERNEL, autotuned_winner
from tests.support.stores.sample_records import sample_trials, winner
from tools import ROOT

COUNTERS = ROOT / "tests" / "data" / "synthetic-flash_fwd.counters.csv"
BENCH = ROOT / "results" / "h200.bench.json"


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file. path: a sound one. read: yields what a program takes of it. is_checked: whether a checksum tells
    another content; a list of shapes and counts of calls have none, so that they need an end in words alone."""

    path: Path
    read: Callable[[Path], Iterator[Any]]
    is_checked: bool = True


def flips(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """So many files of each kind are read."""
    dice, wrong, notes = Random(seed), list[str](), list[str]()
    for name, kind in kinds(folder).items():
        refused, bad = _flip_files(kind, tried, dice)
        wrong += [f"{name}: {each}" for each in bad]
        notes.append(f"{name} {refused:,}")
    return (
        0,
        len(wrong),
        f"of {tried:,} of each kind were refused: {', '.join(notes)}" + "".join(f"; {each}" for each in wrong[:5]),
    )


def _flip_files(kind: FileKind, tried: int, dice: Random) -> tuple[int, list[str]]:
    """Return how many files were refused, and what went wrong with others."""
    content = kind.path.read_bytes()
    sound = set(map(repr, kind.read(kind.path)))
    copy, refused, wrong = kind.path.with_name(f"flipped-{kind.path.name}"), 0, list[str]()
    for _ in range(tried):
        damaged = bytearray(content)
        damaged[place := dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        copy.write_bytes(damaged)
        try:
            found = set(map(repr, kind.read(copy)))
        except BlocktuneError:
            refused += 1
        except Exception as error:
            wrong.append(f"byte {place}: {error!r:.200}")
        else:
            if kind.is_checked and found - sound:
                wrong.append(f"byte {place}: {(found - sound).pop():.200}")
    return refused, wrong


def kinds(folder: Path) -> dict[str, FileKind]:
    """Return every kind of file that commands and production read, but for those of parts of their own."""
    return {
        "stores of autotuned kernels": FileKind(_user_store(folder), _user_rows),
        "exports": FileKind(_export(folder), _exported),
        "exports in the place of a store": FileKind(_export(folder), _serve),
        "signed files": FileKind(_sign(folder), _signed_rows),
        "sweeps": FileKind(_sweep(folder), lambda path: iter(load_sweep(path).trials)),
        "spools": FileKind(_spool(folder), _spooled_records),
        "compiles that are remembered": FileKind(_compile(folder), _remembered),
        "counts of misses": FileKind(_misses(folder), lambda path: iter(read_misses(path).items()), False),
        "counts of launches": FileKind(_launches(folder), lambda path: iter(read_launches(path).items()), False),
        "lists of shapes": FileKind(_shapes(folder), lambda path: iter(flags_of_file(path)), False),
        "counters": FileKind(_copy(folder, COUNTERS), lambda path: iter([CounterFile.read(path).rows()]), False),
        "benches": FileKind(_copy(folder, BENCH), _documents, False),
    }


def _user_store(folder: Path) -> Path:
    path = folder / "user.db"
    with ResultStore.open(path) as store:
        store.merge([Results(bests=(autotuned_winner(64),))], trust=True)
    return path


def _user_rows(path: Path) -> Iterator[Any]:
    for log in path.parent.glob(f"{path.name}-*"):
        log.unlink()
    yield from SqliteRows(path, USER_DISPATCH).read(H200)


def _export(folder: Path) -> Path:
    path = folder / "export.json"
    save_document(export_document(H200, BOTH, sample_trials(2)), path)
    return path


def _exported(path: Path) -> Iterator[Any]:
    bests, trials = records_in_file(path)
    yield from (*bests, *trials)


def _serve(path: Path) -> Iterator[Any]:
    yield from (*rows_in_file(path), *autotuned_rows_in_file(path))


def _sign(folder: Path) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, path = Ed25519PrivateKey.generate(), folder / "signed.json"
    private, public = folder / "key", folder / "key.pub"
    private.touch(mode=0o600)
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    document = frozen_document(H200, BOTH)
    path.write_text(canonical_text(signed(document, document["sha256"], private)) + "\n")
    return path


def _signed_rows(path: Path) -> Iterator[Any]:
    yield from rows_in_file(path, signed_by=path.with_name("key.pub"))


def _sweep(folder: Path) -> Path:
    best = winner()
    sweep = Sweep(device=best.device, environment=best.environment, shape=best.shape, trials=tuple(sample_trials(20)))
    return save_sweep(sweep, folder)


def _spool(folder: Path) -> Path:
    made = spool.Spool(StoreTarget.of(str(folder / "waiting.db")))
    for record in (*sample_trials(3), *BOTH):
        made.keep(record)
    made.close()
    assert made.path is not None
    return made.path


def _spooled_records(path: Path) -> Iterator[Any]:
    """Yield the records of a spool, which is removed or renamed once they are stored."""
    content = path.read_bytes()
    with spool.left_records(path) as left:
        assert left is not None
        yield from (*left.trials, *left.bests)
    path.with_suffix(spool.UNREADABLE_SUFFIX).unlink(missing_ok=True)
    path.write_bytes(content)


def _compile(folder: Path) -> Path:
    best = winner()
    resources = KernelResources(registers=168, shared_bytes=65536, num_warps=4, tensor_cores="wgmma")
    ResourceCache(folder).put("ab" * 32, CompileResult(config=best.config, outcome=Outcome.OK, resources=resources))
    return folder / f"{'ab' * 32}.json"


def _remembered(path: Path) -> Iterator[Any]:
    found = ResourceCache(path.parent).get(path.stem)
    if found is not None:
        yield found


def _misses(folder: Path) -> Path:
    path = folder / "misses.jsonl"
    append_misses(path, {(H200.key, winner().shape): 3})
    return path


def _launches(folder: Path) -> Path:
    path = folder / "launches.jsonl"
    problem = autotuned_winner(64).shape.problem
    append_launches(path, {Kind(H200.key, KERNEL, problem): Launches(3, 1, 0.5)})
    return path


def _shapes(folder: Path) -> Path:
    path = folder / "shapes.toml"
    path.write_text('[prefill]\nseq = [4096, 8192]\ndim = 128\nheads = 32\ncausal = true\ndtype = "bf16"\n')
    return path


def _copy(folder: Path, source: Path) -> Path:
    path = folder / source.name
    path.write_bytes(source.read_bytes())
    return path


def _documents(path: Path) -> Iterator[Any]:
    sources = Sources()
    sources.add(path)
    yield from sources.documents
