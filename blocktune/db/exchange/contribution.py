"""A contribution as one JSON document: what `tune contribute` found on a GPU, for people who do not have it.

    {
      "format": "blocktune-contribution",
      "schema": 1,
      "shapes": 1,                        the version of the fixed shapes
      "machine": "<16 hex>" | null,       a hash of its GPUs' UUIDs, so that no machine counts twice
      "created_at": "2026-11-20T12:00:00+00:00",
      "seconds": 540.0,
      "compiled": [...],                  registers, spills, shared memory and blocks/SM of each config
      "conformance": [...],               one row for each kernel, config and small shape, with its outcome
      "noise": {...} | null,              what `tune lab noise --out` writes
      "bench": {...},                     what `tune bench --out` writes
      "left_out": {"<label>": "<why>"},   shapes and parts without a result
      "results": {...},                   what `tune export --trials` writes: document.py
      "sha256": "<64 hex>",               of the document's canonical text without this field
      "signature": "<128 hex>"            only in a signed one: Ed25519 of the hash
    }

An import reads `machine` and `results` alone. Their rows are borrowed, each with the vote of the machine (votes.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blocktune.db.exchange.untrusted import Untrusted
from blocktune.db.exchange.votes import vote_of
from blocktune.db.records.records import AnyBest
from blocktune.kernels.values.errors import ImportRejectedError
from blocktune.runtime.store_reader.export_file import seal_of

CONTRIBUTION_FORMAT, CONTRIBUTION_SCHEMA = "blocktune-contribution", 1

_PARTS = ("shapes", "machine", "created_at", "seconds", "compiled", "conformance", "noise", "bench", "left_out")
_SEAL = "sha256"


def contribution_document(parts: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sealed document of what was found and the export of its rows."""
    head = {"format": CONTRIBUTION_FORMAT, "schema": CONTRIBUTION_SCHEMA}
    document = head | {name: parts[name] for name in _PARTS} | {"results": dict(results)}
    return document | {_SEAL: seal_of(document)}


def is_contribution(document: Any) -> bool:
    """Return whether a document calls itself a contribution."""
    return isinstance(document, dict) and document.get("format") == CONTRIBUTION_FORMAT


def results_in_contribution(document: Any) -> tuple[Any, str]:
    """Return the exported results in a contribution, not yet checked, and the machine's hash; empty where it has none.

    Raises:
        ImportRejectedError: the document is no contribution of this schema, or was changed after it was written.
    """
    top = Untrusted(document).object(("format", "schema", *_PARTS, "results", _SEAL), ("signature",))
    top["schema"].integer(1, CONTRIBUTION_SCHEMA)
    require_unbroken_seal(document, top[_SEAL])
    machine = "" if top["machine"].value is None else top["machine"].match("[0-9a-f]{16}", "16 hexadecimal digits")
    return top["results"].value, machine


def with_vote(best: AnyBest, machine: str) -> AnyBest:
    """Return a contributed winner with the vote of its machine, or without any where the machine is unknown."""
    return replace(best, votes=(vote_of(machine, best),) if machine else ())


def require_unbroken_seal(document: Mapping[str, Any], seal: Untrusted) -> None:
    """Check that a document is as it was sealed.

    Raises:
        ImportRejectedError: it was changed.
    """
    try:
        seal.match(seal_of(document), "the hash of the rest, so it was changed after it was frozen or written")
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, ImportRejectedError):
            raise
        seal.reject(f"the hash of JSON ({error})")
