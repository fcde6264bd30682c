"""Signed frozen files: who froze a file, which its hash alone does not say.

A signature is Ed25519 over the file's hash, made and checked by the package `cryptography`. Keys are files as openssl
and ssh-keygen make them: `openssl genpkey -algorithm ed25519`, `ssh-keygen -t ed25519`.
"""

import logging
import stat
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.reading import KEY_BYTES, read_trusted
from blocktune.kernels.files.variables import TRUSTED_KEY
from blocktune.kernels.values.errors import StoreError, UsageError, needing

logger = logging.getLogger("blocktune")

SIGNATURE = "signature"
"""The field of a frozen document that holds it: 128 hexadecimal digits."""

_PURPOSE = b"blocktune frozen results\n"
"""Stands before what is signed, so that a signature of something else cannot be taken for one."""


def trusted_key() -> Path | None:
    """Return the public key that the user has named, or None. Whoever reads it says what is wrong with it."""
    named = TRUSTED_KEY.text()
    return Path(named) if named else None


@cache
def warn_of_unused_key(key: Path) -> None:
    """Say once that a key is named and a dispatcher takes what its owner did not sign."""
    logger.warning(
        "%s names %s, but a dispatcher that is not strict takes results without a signature, too. "
        "Dispatcher(strict=True) takes signed files alone.",
        TRUSTED_KEY.name,
        key,
    )


def signed(document: Mapping[str, Any], seal: str, key: str | Path) -> dict[str, Any]:
    """Return a frozen document with its signature.

    Args:
        document: with its hash.
        seal: that hash.
        key: the file of the private key, without a password.

    Raises:
        UsageError: the file holds no private Ed25519 key, others can read it, or `cryptography` is not installed.
    """
    from_pem, from_ssh = _loaders("load_pem_private_key", "load_ssh_private_key")
    content = _key_file(key)
    private = _loaded(key, content, lambda: from_pem(content, None), lambda: from_ssh(content, None))
    if not isinstance(private, _types().Ed25519PrivateKey):
        raise _no_key(key, "a private Ed25519 key")
    _require_private(key)
    return dict(document) | {SIGNATURE: private.sign(_PURPOSE + seal.encode()).hex()}


def require_signature(name: str, document: Mapping[str, Any], seal: str, key: str | Path) -> None:
    """Check that a frozen document was signed by the owner of a key.

    Args:
        name: of the document, for the message.
        document: whose hash is right.
        seal: that hash.
        key: the file of the public key.

    Raises:
        StoreError: it has no signature, or another one.
        UsageError: the file holds no public Ed25519 key, or `cryptography` is not installed.
    """
    from_pem, from_ssh = _loaders("load_pem_public_key", "load_ssh_public_key")
    from cryptography.exceptions import InvalidSignature

    content = _key_file(key)
    public = _loaded(key, content, lambda: from_pem(content), lambda: from_ssh(content))
    if not isinstance(public, _types().Ed25519PublicKey):
        raise _no_key(key, "a public Ed25519 key")
    try:
        public.verify(bytes.fromhex(str(document.get(SIGNATURE, ""))), _PURPOSE + seal.encode())
    except (InvalidSignature, ValueError) as error:
        state = "carries another signature" if SIGNATURE in document else "carries no signature"
        raise StoreError(
            f"A frozen file must be signed by the owner of {key}, but {name} {state}. Sign it with "
            "`tune freeze --sign KEY`, or name the key of whoever signed it."
        ) from error


def _loaders(*names: str) -> list[Callable[..., Any]]:
    with needing("sign", "A signature"):
        from cryptography.hazmat.primitives import serialization
    return [getattr(serialization, name) for name in names]


def _types() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519


def _loaded(key: str | Path, content: bytes, *ways: Callable[[], Any]) -> Any:
    """Return the key, by the first way that can read it."""
    for way in ways:
        try:
            return way()
        except Exception:  # of many types, and the next way may know the format
            continue
    raise _no_key(key, "an Ed25519 key without a password")


def _key_file(key: str | Path) -> bytes:
    try:
        return read_trusted(file_path(key), KEY_BYTES)
    except OSError as error:
        raise UsageError(f"The key file {key} cannot be read: {error.strerror}. Name another file.") from error


def _require_private(key: str | Path) -> None:
    """Check that no one else can read a private key.

    Raises:
        UsageError: the group or all users can.
    """
    mode = stat.S_IMODE(file_path(key).stat().st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise UsageError(f"Others can read the private key {key} (mode {mode:04o}). Change it: chmod 600.")


def _no_key(key: str | Path, wanted: str) -> UsageError:
    return UsageError(f"{key} does not hold {wanted}. Make a key: ssh-keygen -t ed25519")
