"""Odd inputs without a guide: what is known of a parser, changed at random. The same seed draws the same inputs."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.fuzz.corpus import archive_of, load
from tools.fuzz.parsers import PARSERS, judge
from tools.fuzz.requests import stop_server

FILES = ("exports", "frozen", "rows", "sweeps", "shapes")
"""The parsers of files and rows."""


def odd_inputs(inputs: Sequence[bytes], tried: int, seed: int) -> Iterator[bytes]:
    """Yield inputs with a few changes each: bits, bytes, and pieces that are gone, doubled or of another input."""
    dice = random.Random(seed)
    for _ in range(tried):
        content = bytearray(dice.choice(inputs))
        for _ in range(dice.choice((1, 1, 2, 4, 16))):
            dice.choice(_CHANGES)(content, dice.choice(inputs), dice)
        yield bytes(content)


def broken_inputs(name: str, tried: int, seed: int) -> list[str]:
    """Return what broke a rule of a parser, of so many odd inputs."""
    found = []
    known = [*PARSERS[name].seeds(), *load(archive_of(name))]
    for each in odd_inputs(known, tried, seed):
        try:
            judge(PARSERS[name], each)
        except Exception as error:
            found.append(f"{name}: {error!r:.200} of {each!r:.200}")
    return found


def odd_files(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Every parser of files and rows reads odd inputs: it refuses them in words, or takes them."""
    return _counts([each for name in FILES for each in broken_inputs(name, tried // len(FILES), seed)])


def odd_requests(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """The live page gets odd requests: it answers each, and fails at none."""
    try:
        return _counts(broken_inputs("requests", tried, seed))
    finally:
        stop_server()


def _counts(broken: Sequence[str]) -> tuple[int, int, str]:
    return 0, len(broken), "; ".join(broken[:5])


def _place(content: bytearray, dice: random.Random) -> int:
    return dice.randrange(len(content) + 1)


def _flip(content: bytearray, other: bytes, dice: random.Random) -> None:
    if content:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def _replace(content: bytearray, other: bytes, dice: random.Random) -> None:
    if content:
        content[dice.randrange(len(content))] = dice.randrange(256)


def _cut(content: bytearray, other: bytes, dice: random.Random) -> None:
    begin = _place(content, dice)
    del content[begin : begin + dice.randrange(1, 64)]


def _double(content: bytearray, other: bytes, dice: random.Random) -> None:
    begin = _place(content, dice)
    content[begin:begin] = content[begin : begin + dice.randrange(1, 64)]


def _splice(content: bytearray, other: bytes, dice: random.Random) -> None:
    begin = _place(bytearray(other), dice)
    place = _place(content, dice)
    content[place:place] = other[begin : begin + dice.randrange(1, 256)]


def _number(content: bytearray, other: bytes, dice: random.Random) -> None:
    place = _place(content, dice)
    content[place:place] = dice.choice(
        (b"0", b"-1", b"9" * 40, b"1e999", b"NaN", b"null", b"\x00", b"\xff\xfe", b"[" * 3000)
    )


_CHANGES: tuple[Callable[[bytearray, bytes, random.Random], None], ...] = (
    *(_flip, _flip, _replace, _cut, _double),
    *(_splice, _number),
)
