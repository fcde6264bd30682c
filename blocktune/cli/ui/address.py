"""Where the server listens: a port of 127.0.0.1, and the token that every path begins with."""

import secrets
import socket
from dataclasses import dataclass, field

from blocktune.kernels.values.errors import UsageError

HOST = "127.0.0.1"
TOKEN_BYTES = 24


def _new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address that the user opens. token: a request without it gets no answer."""

    port: int
    token: str = field(default_factory=_new_token)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"


def bound_socket(port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine alone; 0 is any that is free.

    Raises:
        UsageError: the port is taken, or not for this user.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen()  # who asks before the server runs waits for it
    except OSError as error:
        found.close()
        raise UsageError(
            f"Port {port} is not free ({error.strerror}). Name another one by `--port`, or 0 for any."
        ) from error
    return found
