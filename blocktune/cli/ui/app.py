"""The server's paths: the page and its files, the data of the views, events, and compiles that a page asks for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from blocktune.cli.report.page import json_text
from blocktune.cli.ui.broadcast import MAX_STREAMS, Broadcast
from blocktune.cli.ui.forms import ConfigForm, KernelsForm, ShapeForm, chosen_device, kernel_choices
from blocktune.cli.ui.live_page import FILES, file_text, live_page
from blocktune.cli.ui.live_store import LiveStore
from blocktune.cli.ui.what_if import WhatIfs
from blocktune.kernels.files.reading import json_value
from blocktune.kernels.values.errors import BlocktuneError, StoreError
from blocktune.kernels.values.shape import AttentionShape

CACHED = {"cache-control": "private, max-age=86400, immutable"}
"""Of the page's files: their address has a token that is another one at every start."""


@dataclass(frozen=True, slots=True)
class Ui:
    """The parts that the paths answer from.

    data_text: makes what every view needs at once, as JSON.
    """

    store: LiveStore
    what_ifs: WhatIfs
    broadcast: Broadcast
    data_text: Callable[[], str]


class _Body(Request):  # type: ignore[misc]
    """A request whose JSON is read as that of files is: two members of one name are refused."""

    async def json(self) -> Any:
        """Return the value in the body."""
        return json_value(await self.body())


class _Route(APIRoute):  # type: ignore[misc]
    """A path whose body is read as `_Body` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        answer = super().get_route_handler()

        async def answer_to(request: Request) -> Response:
            return await answer(_Body(request.scope, request.receive))

        return answer_to


class Routes:
    """The functions that answer the paths. FastAPI runs those that are not `async` in threads."""

    def __init__(self, ui: Ui) -> None:
        self._ui = ui

    def page(self) -> HTMLResponse:
        """Return the page."""
        return HTMLResponse(live_page())

    def file(self, name: str) -> Response:
        """Return a file that the page loads."""
        if name not in FILES:
            return _message(404, "The page has no such file.")
        return Response(file_text(name), media_type=FILES[name], headers=CACHED)

    def data(self) -> Response:
        """Return what every view needs at once."""
        return _json(self._ui.data_text())

    def overview(self) -> Response:
        """Return the sweeps that there are."""
        return _json(json_text(self._ui.store.overview()))

    def table(self, name: str) -> Response:
        """Return a sweep."""
        return _json(self._ui.store.table_text(name))

    async def events(
        self,
        seen: Annotated[str, Query(pattern=r"^\d{1,9}\.\d{1,9}$")],
        sweep: Annotated[str, Query(max_length=100)] = "",
        last_event_id: Annotated[str | None, Header(pattern=r"^\d{1,9}\.\d{1,9}$")] = None,
    ) -> Response:
        """Return the events of a page from now on; a browser that comes back says what it has seen."""
        if self._ui.broadcast.is_full:
            return _message(503, f"{MAX_STREAMS} pages follow already. Close one of them.")
        store, own = map(int, (last_event_id or seen).split("."))
        return StreamingResponse(self._ui.broadcast.events(sweep, (store, own)), media_type="text/event-stream")

    def shape(self, form: ShapeForm) -> Response:
        """Return the shape that a form means, and its youngest sweep, where there is one."""
        device, shape = chosen_device(self._ui.store, form.device), form.shape()
        sweep = self._ui.store.headline_of(device, shape)
        found = {"device": device.name, "shape": shape.to_json(), "label": shape.label, "sweep": sweep}
        return _json(json_text(found))

    def kernels(self, form: KernelsForm) -> Response:
        """Return the kernels that compute a shape."""
        device = chosen_device(self._ui.store, form.device)
        return _json(json_text(kernel_choices(AttentionShape.from_json(form.shape), device)))

    def ask(self, form: ConfigForm) -> Response:
        """Put a compile into the queue."""
        device = chosen_device(self._ui.store, form.device)
        return _json(json_text(self._ui.what_ifs.ask(form.request(device), device)))

    def compile_state(self, number: int) -> Response:
        """Return how far a compile is."""
        return _json(json_text(self._ui.what_ifs.state(number)))

    def cancel(self, number: int) -> Response:
        """Drop a compile."""
        return _json(json_text(self._ui.what_ifs.cancel(number)))


def make_app(ui: Ui, token: str) -> FastAPI:
    """Return the application.

    Args:
        ui: what it answers from.
        token: first part of every path.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=_lifespan(ui))
    app.include_router(_router(Routes(ui)), prefix=f"/{token}")
    app.add_exception_handler(BlocktuneError, _say_error)
    app.add_exception_handler(RequestValidationError, _say_invalid)
    return app


def _router(paths: Routes) -> APIRouter:
    router = APIRouter(route_class=_Route)
    for path, answer in {
        "/": paths.page,
        "/data": paths.data,
        "/overview": paths.overview,
        "/table/{name}": paths.table,
        "/events": paths.events,
        "/what-if/{number}": paths.compile_state,
        "/{name}": paths.file,
    }.items():
        router.add_api_route(path, answer, methods=["GET"], response_model=None)
    router.add_api_route("/shape", paths.shape, methods=["POST"], response_model=None)
    router.add_api_route("/kernels", paths.kernels, methods=["POST"], response_model=None)
    router.add_api_route("/what-if", paths.ask, methods=["POST"], response_model=None)
    router.add_api_route("/what-if/{number}", paths.cancel, methods=["DELETE"], response_model=None)
    return router


def _lifespan(ui: Ui) -> Callable[[FastAPI], Any]:
    """Return what runs while the server does: the reading of the database."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        reading = asyncio.create_task(ui.broadcast.run())
        yield
        await reading

    return lifespan


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


def _message(status: int, text: str) -> JSONResponse:
    return JSONResponse({"message": text}, status_code=status)


def _say_error(request: Request, error: Exception) -> Response:
    """Return an error that blocktune raises on purpose, as words for the page."""
    del request
    return _message(503 if isinstance(error, StoreError) else 422, str(error))


def _say_invalid(request: Request, error: Exception) -> Response:
    """Return what is wrong with the fields of a request."""
    del request
    assert isinstance(error, RequestValidationError)
    places = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
    return _message(422, f"A request has the fields of its form, but this one differs: {places}.")
