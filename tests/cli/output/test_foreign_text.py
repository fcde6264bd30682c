"""What files and names bring reaches a terminal and a log spelt and cut, whatever command reads it."""

import itertools
import json
import logging
import os
import random
import sqlite3
import string
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktune.cli.main import app
from blocktune.db.exchange.document import document_from
from blocktune.db.exchange.importing import records_from
from blocktune.kernels.files.foreign_text import MAX_CHARACTERS, shown
from blocktune.kernels.values.errors import ImportRejectedError
from tests.support.command_line import CliRunner
from tests.support.stores.filled_stores import filled
from tests.support.stores.sample_records import sample_trials, winner

TITLE = "\x1b]0;owned\x07\x1b[31m\u202e\x9b"
EXIT_CODES = (0, 2, 3, 4, 5, 6, 7)
SIGNS = string.ascii_letters + string.digits + string.punctuation.replace("/", "")
RUNS = 5000 if os.environ.get("BLOCKTUNE_FAULTS") == "full" else 40


def require_harmless(result: Any) -> None:
    for text in (result.stdout, result.stderr):
        assert all(sign.isprintable() or sign in "\n\t" for sign in text)
    assert len(result.stderr) < 2 * MAX_CHARACTERS
    assert "Traceback" not in result.stderr
    assert result.exit_code in EXIT_CODES, result.exception


def test_control_characters_are_spelt_and_the_rest_is_cut() -> None:
    assert shown("a\tb\nµ") == "a\tb\nµ"
    assert shown(f"x{TITLE}") == r"x\x1b]0;owned\x07\x1b[31m\u202e\x9b"
    assert shown("\ud800") == r"\ud800"
    assert shown("x" * 10_000_000, 5) == "xxxxx... (10,000,000 characters)"


def test_a_log_gets_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("blocktune").warning("%s of %d", TITLE + "x" * 10_000, 3)
    (record,) = caplog.records
    assert record.getMessage().startswith(r"\x1b]0;owned")
    assert len(record.getMessage()) < 2 * MAX_CHARACTERS


def test_a_table_of_others(tune) -> None:
    with closing(sqlite3.connect(tune.db)) as connection, connection:
        connection.execute(f'CREATE TABLE "{TITLE}{"x" * 100_000}"(a)')
    for words in (("list",), ("doctor",), ("doctor", "--recover"), ("merge", tune.db), ("export", "-")):
        result = tune(*words)
        require_harmless(result)
        assert "belongs to another program" in result.stdout + result.stderr


def test_names_in_a_schema_that_sqlite_itself_repeats(tune, winner) -> None:
    tune.store(winner())
    with closing(sqlite3.connect(tune.db)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET name = ?, tbl_name = ? WHERE name = 'best'", (TITLE, TITLE))
    for words in (("list",), ("doctor",), ("best", "--seq", 8192, "--dim", 64, "--device", "h200")):
        require_harmless(tune(*words))


def test_tables_and_names_of_files(tune, tmp_path: Path) -> None:
    shapes = tmp_path / f"{TITLE}.toml"
    for text in (f"[{json.dumps(TITLE)}]\nseq = 1", f"{json.dumps(TITLE)} = 1", "[a]\nseq = " + "[" * 100_000):
        shapes.write_text(text)
        require_harmless(tune("run", "--shapes", shapes, "--device", "h200"))
    for words in (("import", tmp_path / f"{TITLE}.json"), ("diff", TITLE, TITLE), ("list", "--db", f"{TITLE}.json")):
        require_harmless(tune(*words))


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    found = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((*way, key))
        if isinstance(inner, (dict, list)):
            found += places(inner, (*way, key))
    return found


JUNK = (
    None,
    True,
    -1,
    2**63,
    10**400,
    1e308,
    float("nan"),
    "",
    TITLE,
    "a" * 100_000,
    "\u202e",
    "\0",
    [],
    {},
    {TITLE: 1},
)


def test_no_document_gives_a_traceback_or_a_control_character(tune, winner, tmp_path: Path) -> None:
    sound = json.dumps(document_from(winner().device, [winner()], []))
    rng = random.Random(0)
    file = tmp_path / "results.json"
    ended: set[int] = set()
    for _ in range(RUNS):
        document = json.loads(sound)
        *way, last = rng.choice(places(document))
        inner = document
        for key in way:
            inner = inner[key]
        if rng.random() < 0.7 or isinstance(inner, list):
            inner[last] = rng.choice(JUNK)
        else:
            inner[TITLE + str(last)] = inner.pop(last)
        file.write_text(json.dumps(document))
        for words in (("import", file), ("diff", file, file)):
            result = tune(*words)
            require_harmless(result)
            ended.add(result.exit_code)
    assert 2 in ended
    require_harmless(tune("list"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.update({TITLE: 1}),
        lambda document: document["bests"][0]["shape"].update(dtype="x" * 1_000_000),
        lambda document: document["device"].update({"x" * 1_000_000: 1}),
        lambda document: document.update(bests=[[[]] * 100_000]),
    ],
)
def test_a_refusal_is_short(spoil: Callable[[dict[str, Any]], None], winner) -> None:
    document = json.loads(json.dumps(document_from(winner().device, [winner()], [])))
    spoil(document)
    with pytest.raises(ImportRejectedError) as caught:
        records_from(document)
    assert len(str(caught.value)) < 1500
    assert str(caught.value).isprintable()


COMMAND = [sys.executable, "-P", "-m", "blocktune", "list", "--shipped"]


@pytest.mark.few(2)
@pytest.mark.parametrize("options", ["", "--json", "--format csv", "--format triton", "--format vllm"])
def test_a_full_disk_behind_the_output_is_said(options: str, tmp_path: Path) -> None:
    command = [*COMMAND, *options.split()]
    if "--format" in options:
        filled(tmp_path / "s.db", winner(), sample_trials(1)[0], 3)
        command = [*COMMAND[:4], "export", "-", *options.split(), "--db", str(tmp_path / "s.db")]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert result.returncode == 2
    assert result.stderr == "error: The output cannot be written: No space left on device. " + (
        "Send it to another place.\n"
    )


def test_a_closed_output_is_no_error() -> None:
    result = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *COMMAND], stderr=subprocess.PIPE, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_words_of_the_command_line_are_spelt(tune) -> None:
    for words in (("list", TITLE), (TITLE,), ("list", f"--{TITLE}"), ("best", "--seq", TITLE)):
        result = tune(*words)
        require_harmless(result)
        assert result.exit_code == 2


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://user:hunter2@host/name",
        "postgresql+psycopg:/user:hunter2@host/name",
        "postgresql://:hunter2@host/name?sslmode=require",
        "postgresql://user:p:hunter2@@host/name",
        "sqlite:///o.db?password=hunter2",
        "postgresql://host/name?x=1&PASSWORD=hunter2&y=2",
        "postgresql://user:hun/hunter2/x@host/name",
        "postgresql://user:a hunter2 b@host/name",
        "postgresql://user:!://hunter2@host/name",
        "postgresql://user:1234;hunter2@host/name",
        "postgresql://me@corp.com:hunter2@host/name",
        "postgresql:///user:hunter2@host/name",
        "//user:hunter2@host/name",
        "user:hunter2@host/name",
        "user:a/@hunter2@host/name",
        "--postgresql://user:hunter2@host/name",
        "postgresql://user:" + "2" * 2000 + "hunter2@host/name",
        "postgresql://user:hunter2...",  # what a message has cut
        "'postgresql://user:a'hunter2",
        "host=h password='hunter2' user=u",
        'host=h password = "a hunter2" user=u',
        "host=h password = hunter2",
        '{"password": "hunter2"}',
        "x" * (MAX_CHARACTERS - 30) + " postgresql://user:hunter2" + "2" * 100 + "@host/name",
    ],
)
def test_passwords_of_urls_are_hidden(url: str) -> None:
    text = shown(f"Got unexpected extra argument ({url})")
    assert "hunter2" not in text
    assert "***" in text or len(text) > MAX_CHARACTERS


@given(before=st.text(SIGNS, max_size=9), after=st.text(SIGNS, max_size=9))
def test_no_sign_of_a_password_makes_it_seen(before: str, after: str) -> None:
    for text in ("postgresql://u:{}@h/x", "got 'postgresql+psycopg://me@corp.com:{}@10.0.0.1:5432/x?y=z'. Correct it."):
        assert "hunter2" not in shown(text.format(f"{before}hunter2{after}"))


ODD_PASSWORDS = (
    *(
        "{}",
        " {}",
        "\t!{}",
        "a {}",
        "{} b",
        "a%20{}",
        "a%26{}",
        "a&{}",
        "a;{}",
        "a,{}",
        "a'{}",
        'a"{}',
        "a@{}",
        "a:{}",
        "a/{}",
    ),
    *("a={}", "a#{}", "a?{}", "a\\{}", "a\\' {}", "a\t{}", "[{}]", "(({}))", "a\u202e{}", "1234 {}", "a://{}"),
)
PLACES = (
    *("postgresql://u:{}@h/x", "postgresql+psycopg://u:{}@h:5432/x?y=z", "postgresql:/u:{}@h/x", "//u:{}@h is missing"),
    *("No such folder: /u:{}@h. Make it.",),
    *(
        "--u:{}@h:1/x",
        "--db=postgresql://u:{}@h/x",
        "u:{}@h:5432/x",
        "u:{}@[::1]:1/x",
        "postgresql://u:{}@[::1]:5432/x",
    ),
    *("sqlite:///o.db?password={}", "postgresql://h/x?a=1&PASSWORD={}&y=2", "postgresql://h/x?pass%77ord={}"),
    *("postgresql://h:1/x?sslpassword={}", "postgresql%3A%2F%2Fu%3A{}%40h%2Fx", "postgresql://h?user=u&password%3D{}"),
    *("host=h password={}", "host=h password='{}' user=u", 'PGPASSWORD="{}"', "{{'password': '{}'}}"),
    *('{{"password": "{}", "user": "u"}}', "postgresql://u:%25{}@h/x"),
)
MESSAGES = ("{}", "Got unexpected extra argument ({})", "No such command '{}'.", "{!r} cannot be read. Correct it.")


@pytest.mark.parametrize("place", PLACES)
def test_no_spelling_of_a_password_is_seen(place: str) -> None:
    for password, message in itertools.product(ODD_PASSWORDS, MESSAGES):
        text = message.format(place.format(password.format("hunter2")))
        assert "hunter2" not in shown(text), text


def test_what_is_no_password_stays() -> None:
    for text in (
        "https://example.org:8080/x",
        "mail user@host",
        "a:b@c",
        "n=5 @ 3",
        "postgresql://user@host:5432/name",
        "http://[::1]:8080/ and http://127.0.0.1:8000, mail me@example.org",
        "50 % of 100%25 at https://example.org/a%3Ab",
        "error:/tmp/x:12: without a password: see module.x:fn",
    ):
        assert shown(text) == text


def test_hiding_takes_no_long_time() -> None:
    began = time.process_time()
    for text in (
        "a://b:" * 40_000,
        "a" * 200_000 + "@=",
        "a://b:c " * 25_000,
        "a:b@" * 50_000,
        "pwd='" * 40_000,
        "password=" * 30_000 + "@",
    ):
        shown(text, 200_000)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "command",
    [
        "report URL",
        "lab calibrate URL --out x.json",
        "kernels URL",
        "verify URL",
        "gc URL",
        "--URL",
        "URL",
        "list --URL",
    ],
)
def test_a_forgotten_flag_shows_no_password(command: str, tmp_path: Path) -> None:
    url = "postgresql+psycopg://user:hunter2@127.0.0.1:1/name?password=hunter2"
    done = CliRunner().invoke(app, command.replace("URL", url).replace("x.json", str(tmp_path / "x.json")).split())
    assert done.exit_code in EXIT_CODES
    assert "hunter2" not in done.output
    assert done.output.strip()
