"""The first line of a table that lacks rivals."""

from collections.abc import Collection, Iterable

from blocktune.tuner.compare.report import PEERS

EXPECTED = ("cudnn", "fa3", "fa4")
"""Peers without which a table says so."""


def sentence_without(timed: Collection[str]) -> str:
    """Return a sentence, with a space after it, that names the expected rivals that were not timed; empty where all
    were."""
    names = missing(timed)
    return f"Measured without {names}. " if names else ""


def missing(timed: Collection[str]) -> str:
    """Return the expected rivals that were not timed, as a list in words; empty where all were."""
    return _enumerate_words([PEERS[name] for name in EXPECTED if name not in timed])


def peers_in(texts: Iterable[str]) -> set[str]:
    """Return the expected rivals that headings or cells of a table name, by their own name or their title."""
    lines = list(texts)
    return {name for name in EXPECTED if any(name == line or PEERS[name] in line for line in lines)}


def _enumerate_words(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
