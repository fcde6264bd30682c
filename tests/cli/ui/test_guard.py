"""The server answers its own page and refuses everyone else."""

import re
from collections.abc import Iterator

import pytest

from blocktune.cli.ui.address import bound_socket
from blocktune.kernels.values.errors import UsageError
from tests.cli.ui.conftest import filled_store
from tests.support.stores.live_servers import LiveServer, live_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(filled_store(tmp_path_factory.mktemp("guard") / "search.db")) as running:
        yield running


def test_the_address_is_of_this_machine_and_its_token_is_long(server: LiveServer) -> None:
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{30,})/", server.url)
    assert found
    assert int(found[1]) == server.port


@pytest.mark.parametrize("path", ["/", "/data", "/wrong/", "/wrong/data", "", "//data"])
def test_without_the_token_there_is_nothing(server: LiveServer, path: str) -> None:
    status, headers, body = server.send(path or server.path[:-2])
    assert status == 404
    assert b"has a token" in body
    assert "content-security-policy" in headers


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1", "127.0.0.1:1", "localhost.example.org", "[::1]", ""])
def test_another_host_is_refused(server: LiveServer, host: str) -> None:
    status, _, body = server.send(server.path, headers={"Host": host})
    assert status == 421
    assert b"127.0.0.1 or localhost" in body


def test_localhost_is_this_machine(server: LiveServer) -> None:
    assert server.send(server.path, headers={"Host": f"localhost:{server.port}"})[0] == 200


@pytest.mark.parametrize("origin", ["https://example.org", "null", "http://127.0.0.1", "https://127.0.0.1:{port}"])
@pytest.mark.parametrize(("method", "path"), [("GET", "data"), ("GET", "events?seen=0.0"), ("POST", "what-if")])
def test_another_origin_is_refused(server: LiveServer, origin: str, method: str, path: str) -> None:
    headers = {"Origin": origin.format(port=server.port)}
    assert server.send(server.path + path, method, {} if method == "POST" else None, headers)[0] == 403


@pytest.mark.parametrize(("method", "path"), [("POST", "shape"), ("POST", "what-if"), ("DELETE", "what-if/1")])
def test_what_changes_something_needs_an_origin(server: LiveServer, method: str, path: str) -> None:
    status, _, body = server.send(server.path + path, method, {})
    assert status == 403
    assert b"no Origin" in body


@pytest.mark.parametrize("path", ["", "page.js", "data", "nothing", "table/nothing"])
def test_every_answer_says_what_a_browser_may_do(server: LiveServer, path: str) -> None:
    _, headers, _ = server.send(server.path + path)
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers
    kept = "private, max-age=86400, immutable" if path == "page.js" else "no-store"
    assert headers["cache-control"] == kept


def test_the_page_loads_its_own_files_alone(server: LiveServer) -> None:
    text = server.send(server.path)[2].decode()
    assert re.findall(r'(?:src|href)="([^"#]+)"', text) == ["page.css", "vega.js", "page.js"]
    assert "<script>" not in text
    assert "<style>" not in text
    for name, kind in {"page.css": "text/css", "vega.js": "text/javascript", "page.js": "text/javascript"}.items():
        status, headers, _ = server.send(server.path + name)
        assert (status, headers["content-type"].split(";")[0]) == (200, kind)


@pytest.mark.parametrize("path", ["../server.py", "%2e%2e/app.py", "live.css", "openapi.json", "docs", "page.js/x"])
def test_no_other_file_is_served(server: LiveServer, path: str) -> None:
    assert server.send(server.path + path)[0] == 404


def test_a_request_that_is_no_form_is_one_message(server: LiveServer) -> None:
    for path, body in (("shape", {}), ("what-if", {"device": 3}), ("kernels", [])):
        status, answer = server.ask(path, "POST", body)
        assert status == 422
        assert "fields of its form" in answer["message"]
    assert server.ask("events?seen=x")[0] == 422


def test_the_port_that_is_taken_is_named(server: LiveServer) -> None:
    with pytest.raises(UsageError, match=f"{server.port} is not"):
        bound_socket(server.port)
