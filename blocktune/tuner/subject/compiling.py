"""Compiles one subject's configs in the background of a search: `ConfigCompiler`."""

from concurrent.futures import Future
from typing import Protocol

from blocktune.db.records.records import ConfigT
from blocktune.tuner.compile.compiler import CompileResult


class ConfigCompiler(Protocol[ConfigT]):
    """Compiles configs of one subject in the background."""

    def submit(self, config: ConfigT) -> "Future[CompileResult[ConfigT]]":
        """Compile a config; the future has a result however the compile ends."""


class PreparingConfigCompiler(ConfigCompiler[ConfigT], Protocol[ConfigT]):
    """Starts before there is work, and compiles what confirms a winner."""

    def start(self) -> None:
        """Start what compiles, so that the first config need not wait for it."""

    def submit_confirmation(self, config: ConfigT) -> None:
        """Compile what the check of a likely winner launches besides the config's own code."""
