"""The one door for text that a file, a server or a name brought, before a terminal or a log gets it.

A terminal obeys some characters instead of showing them: they would move its cursor, change its title or hide what was
said. Such a character is spelt, as in `\\x1b`, what is too long is cut, and passwords of URLs are hidden.
"""

import logging
import re
from collections.abc import Iterator
from urllib.parse import unquote

MAX_CHARACTERS = 4000
"""Of a message. Ours are shorter; what a stranger adds may be of any length."""


_MAX_PASSWORD = 1024

_NUMBER = re.compile(r"[+-]?[\d.,]+(?:[eE][+-]?\d+)?")
_PORT = r"(?!\d{1,5}(?:[\s'\"/?#,.;)\]]|$)(?!\S*@))"
_HOST = r"(?:[\w.-]+|\[[\da-fA-F:.]+\])"
_PASSWORDS = (
    # up to the last @, whatever stands in between; where a message was cut before it, to the end of the word
    re.compile(
        rf"(?<![\w+.])((?:[A-Za-z][\w+.-]{{0,40}}:/+|//)[^\s:/'\"[]*:){_PORT}"
        rf"(?:(?:(?!://)[^\n]){{1,{_MAX_PASSWORD}}}(?=@)|\S+)"
    ),
    re.compile(rf"(?<![\w:.@+-])([\w.%+-]+:)(?!//)(?=\S)[^\n]{{1,{_MAX_PASSWORD}}}(?=@{_HOST}[:/])"),
    re.compile(rf"(?<![\w:.@+-])([\w.%+-]+:)(?!//)[^\n]{{1,{_MAX_PASSWORD}}}(?=@{_HOST}:\d+/)"),
    re.compile(rf"(?<![\w:.@+-])([\w.%+-]+:)(?!//)\S{{1,{_MAX_PASSWORD}}}(?=@(?:[\w-]+\.[\w.-]+|localhost))"),
    re.compile(rf"(?<!/)(/[\w.%+-]+:)(?!/)[^\n]{{1,{_MAX_PASSWORD}}}(?=@[\w-])"),  # a folder made of a URL
    # an option ends where the next one begins: what else follows may belong to it
    re.compile(r"((?:password|passwd|pwd)\s*=\s*)(?:(?![&\s][\w.%-]+\s*=)[^\n])+", re.IGNORECASE),
    re.compile(
        r"""((?:password|passwd|pwd)\\?["']\s*:\s*)(?:(?!,\s*\\?["'][\w.-]+\\?["']\s*:)[^\n])+""", re.IGNORECASE
    ),
)
"""Of URLs, also of one that has lost its scheme or slashes, and of options of URLs, of libpq and of JSON."""


def shown(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return a text as people may see it: lines and tabs stay, other control characters are spelt, passwords hidden."""
    cut = text[: most + _MAX_PASSWORD]
    cut = _without_passwords(cut)[:most]
    plain = cut if cut.isprintable() else "".join(map(_shown_sign, cut))
    return plain if len(text) <= most else f"{plain}... ({len(text):,} characters)"


def _without_passwords(text: str) -> str:
    """Return a text with three stars for each password. A text that has some once it is decoded, as that of a URL
    inside of another one, is returned decoded."""
    hidden, end = "", 0
    for start, stop in sorted(_places_of_passwords(text)):
        hidden += f"{text[end:start]}***" if start >= end else ""
        end = max(end, stop)
    hidden += text[end:]
    decoded = unquote(hidden)
    return hidden if decoded == hidden or (found := _without_passwords(decoded)) == decoded else found


def _places_of_passwords(text: str) -> Iterator[tuple[int, int]]:
    """Yield where passwords begin and end, each as one pattern sees it."""
    for password in _PASSWORDS if ":" in text or "=" in text else ():
        yield from ((found.end(1), found.end()) for found in password.finditer(text))


_FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a formula of a spreadsheet may begin with, also in the wide signs of East Asia."""


def cell(text: str) -> str:
    """Return a text as a cell of a table. A spreadsheet would compute one that begins like a formula, whatever blanks
    are in front, and shows it after an apostrophe; a number stays."""
    begins = text.startswith(_FORMULA_SIGNS) or text.strip().startswith(_FORMULA_SIGNS)
    return f"'{text}" if begins and not _NUMBER.fullmatch(text) else text


def spelt(sign: str) -> str:
    """Return a character as Python would write it."""
    return sign.encode("unicode_escape", "surrogatepass").decode()


def _shown_sign(sign: str) -> str:
    return sign if sign.isprintable() or sign in "\n\t" else spelt(sign)


class _ShownOnly(logging.Filter):
    """Lets every message of blocktune through the door."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = shown(record.getMessage()), ()
        return True


logging.getLogger("blocktune").addFilter(_ShownOnly())
