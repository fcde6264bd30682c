"""Access to the server, and the rights of a browser over its answers.

A server on 127.0.0.1 is open to every program of this machine and, through the user's browser, to every web page. So
every path begins with a token that only the printed address has; `Host` must be this server, which stops a name that
a stranger points here; and `Origin`, where there is one, must be this server's own page.
"""

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may run and load: its own files."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",  # an address holds the token
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MAX_BODY_BYTES = 1 << 16
"""Of a request: forms have some hundred."""
UNSAFE_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class Guard:
    """Lets requests of the page through to the application, and refuses the others.

    Args:
        application: gets what is let through.
        token: first part of every path.
        port: where the server listens.
    """

    def __init__(self, application: Application, token: str, port: int) -> None:
        self._application = application
        self._token = token
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._application(scope, _bound_body(receive), _with_headers(send))
        else:
            await _refuse(*refusal, _with_headers(send))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason where a request is refused."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get("host", "") not in self._hosts:
            return 421, "This server answers as 127.0.0.1 or localhost with its port. Open the printed address."
        origin = headers.get("origin")
        if origin is None and scope["method"] in UNSAFE_METHODS:
            return 403, "What changes something must come from this server's page, but the request has no Origin."
        if origin is not None and origin not in {f"http://{host}" for host in self._hosts}:
            return 403, "Requests must come from this server's own page, but another site sent this one."
        _, _, path = scope["path"].partition("/")  # `OPTIONS *` and `CONNECT` have none
        token = path.partition("/")[0]
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return 404, "Nothing is here. The address that `tune ui` printed has a token; open that one."
        if not _is_short(headers.get("content-length", "0")):
            return 413, f"A request of the page has at most {MAX_BODY_BYTES} bytes, but this one has more."
        return None


def _is_short(length: str) -> bool:
    return length.isdecimal() and len(length) < 10 and int(length) <= MAX_BODY_BYTES


def _bound_body(receive: Receive) -> Receive:
    """Return what receives a request, and takes one that sends more than it may for one whose client has gone."""
    received = 0

    async def receiving() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        return message if received <= MAX_BODY_BYTES else {"type": "http.disconnect"}

    return receiving


def _with_headers(send: Send) -> Send:
    """Return what sends an answer with the headers that every answer has."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            known = {name.lower() for name, _ in message["headers"]}
            cache = [] if b"cache-control" in known else [(b"cache-control", b"no-store")]
            message["headers"] = [*message["headers"], *own, *cache]
        await send(message)

    return sending


async def _refuse(status: int, reason: str, send: Send) -> None:
    body = reason.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
