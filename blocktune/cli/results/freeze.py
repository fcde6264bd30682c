"""`tune freeze`: the winners as one small file for production, the same on every rank."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.render import note, print_json, say
from blocktune.cli.shared.options import AsJson, Database, OneDevice
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.files.file_path import short_stem
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError
from blocktune.kernels.values.text import counted
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.db.records.records import AnyBest
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec


def freeze(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; with --all, the folder.")],
    device: OneDevice = None,
    every: Annotated[bool, typer.Option("--all", help="All devices, each in a file of the folder OUT.")] = False,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign the file with this private Ed25519 key.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option("--verify", metavar="KEY", help="Check the file OUT with this public key instead.")
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write winners of all kernels to a sealed file for production.

    Equal winners give equal bytes, so ranks that hold equal files choose equal configs. The file carries the hash of
    its content. Production reads it by BLOCKTUNE_DB=h200.json; `tune import`, `merge` and `diff` read it too.
    With --sign it also carries a signature: if BLOCKTUNE_TRUSTED_KEY names a public key, a strict dispatcher and
    autotuned kernels take only files that its owner signed.

    \b
    tune freeze h200.json --device h200
    tune freeze frozen --all
    tune freeze h200.json --device h200 --sign ~/.ssh/id_ed25519
    tune freeze h200.json --verify ~/.ssh/id_ed25519.pub
    """
    if verify is not None:
        _verify(out, verify, as_json)
        return
    from blocktune.db.exchange.document import frozen_document, save_text
    from blocktune.kernels.files.json_pieces import canonical_text
    from blocktune.kernels.files.signature import signed

    if every and device:
        raise UsageError(f"`--all` freezes every device, but --device names {device!r}. Leave one of them out.")
    with existing_store(db) as store:
        winners = _winners(store) if store else {}
    documents = {each: frozen_document(each, winners[each.key]) for each in _devices(winners, device, every)}
    if sign is not None:
        documents = {each: signed(document, document["sha256"], sign) for each, document in documents.items()}
    written: list[dict[str, Any]] = []
    try:
        if every:
            out.mkdir(parents=True, exist_ok=True)
        for each, document in documents.items():
            path = out / f"{_file_name(each)}.json" if every else out
            text = canonical_text(document) + "\n"
            save_text(text, path)
            row = {"file": str(path), "device": each.name, "bests": len(document["bests"])}
            written.append(row | {"sha256": document["sha256"], "bytes": len(text.encode())})
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}. Name another place.") from error
    if as_json:
        print_json({"files": written})
        return
    for made in written:
        note(
            f"froze {counted(made['bests'], 'winner')} of {made['device']} in {made['file']} ({made['bytes']:,} bytes)"
        )
        say(f"{made['sha256']}  {made['file']}")


def _verify(path: Path, key: Path, as_json: bool) -> None:
    """Say that a file is as it was frozen, and signed by the owner of a key.

    Raises:
        StoreError: it is not.
    """
    from blocktune.runtime.store_reader.export_file import autotuned_rows_in_file, rows_in_file

    rows = rows_in_file(path, signed_by=key) + autotuned_rows_in_file(path, signed_by=key)
    if as_json:
        print_json({"file": str(path), "key": str(key), "bests": len(rows)})
    else:
        note(f"{path} holds {counted(len(rows), 'winner')}, as the owner of {key} signed them")


def _winners(store: "ResultStore") -> "dict[str, list[AnyBest]]":
    """Return the winners of all kernels by the key of their device."""
    found: dict[str, list[AnyBest]] = {}
    for best in store.all_bests():
        found.setdefault(best.device.key, []).append(best)
    return found


def _devices(winners: "Mapping[str, Sequence[AnyBest]]", name: str | None, every: bool) -> "list[DeviceSpec]":
    """Return the devices to freeze, each of which has winners.

    Raises:
        NothingMeasuredError: there is nothing to freeze.
        UsageError: the store has winners of several devices and none was chosen.
    """
    found = {key: bests[0].device for key, bests in winners.items()}
    if name is not None:
        wanted = choose_device(name)
        found = {key: device for key, device in found.items() if key == wanted.key}
    if not found:
        raise NothingMeasuredError(
            f"There are no winners{f' of {name}' if name else ''} to freeze. `tune run` finds them; --db or "
            "BLOCKTUNE_DB names another database."
        )
    if len(found) > 1 and not every:
        names = ", ".join(device.name for device in found.values())
        raise UsageError(
            f"A frozen file is of one device, but the database has {names}. Name one by --device, or freeze each by "
            "--all."
        )
    return list(found.values())


def _file_name(device: "DeviceSpec") -> str:
    """Return a name for a file from what tells devices apart; device names may come from anywhere."""
    return short_stem(re.sub(r"[^a-z0-9]+", "-", device.key.lower()).strip("-"))
