"""The server itself, and everything that runs while it listens."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from blocktune.cli.ui.address import ServerAddress
from blocktune.cli.ui.app import Ui, make_app
from blocktune.cli.ui.broadcast import POLL_SECONDS, Broadcast
from blocktune.cli.ui.connection import MAX_ACCEPTED, BoundedConnection
from blocktune.cli.ui.guard import Guard
from blocktune.cli.ui.live_page import file_text
from blocktune.cli.ui.live_store import LiveStore
from blocktune.cli.ui.page_text import PageText
from blocktune.cli.ui.what_if import WhatIfs
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.tuner.compile_server.farm import CompileFarm

if TYPE_CHECKING:
    from blocktune.cli.report.sources import Sources
    from blocktune.db.tables.location import StoreTarget

logger = logging.getLogger("blocktune")

END_SECONDS = 5
"""How long a page that is open may keep the server from ending."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server. poll_seconds: between two looks at the database."""

    target: "StoreTarget"
    sources: "Sources"
    poll_seconds: float = POLL_SECONDS


def serve(settings: ServerSettings, address: ServerAddress, listening: socket.socket) -> None:
    """Serve until Ctrl-C."""
    with CompileFarm(workers=1) as farm:
        make_server(settings, WhatIfs(farm), address).run(sockets=[listening])


def make_server(settings: ServerSettings, what_ifs: WhatIfs, address: ServerAddress) -> uvicorn.Server:
    """Return a server that does not run yet.

    Args:
        settings: what is served.
        what_ifs: makes compiles.
        address: where it will listen.
    """
    store = LiveStore(settings.target, settings.sources.sweeps)
    data = PageText(store, settings.target, settings.sources)
    broadcast = Broadcast(store, settings.poll_seconds)
    app = make_app(Ui(store, what_ifs, broadcast, data.text), address.token)
    config = uvicorn.Config(
        Guard(app, address.token, address.port),
        log_level="error",  # anyone on this machine can send what it would warn of
        access_log=False,  # a line of it would hold the token
        server_header=False,
        ws="none",
        http=BoundedConnection,
        backlog=MAX_ACCEPTED,
        timeout_graceful_shutdown=END_SECONDS,
    )
    server = uvicorn.Server(config)

    def ended() -> bool:
        return bool(server.should_exit)

    broadcast.close_when(ended)
    steps = (partial(file_text, "vega.js"), store.refresh, data.text, what_ifs.prepare)
    threading.Thread(target=_prepare, args=(steps, ended), name="blocktune-ui").start()
    return server


def _prepare(steps: Iterable[Callable[[], object]], ended: Callable[[], bool]) -> None:
    """Read and load what the first page will need, while the user opens it, unless the server ends before. What cannot
    be made costs a warning: the page says so, too.

    The process waits for a step that runs: one that is cut off while it imports PyTorch aborts the process.
    """
    for step in steps:
        try:
            if not ended():
                step()
        except BlocktuneError as error:
            logger.warning("%s", error)
