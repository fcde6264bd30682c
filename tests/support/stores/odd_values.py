"""What a variable of the environment may hold by mistake, and what a path may lead to."""

import os
import socket
from pathlib import Path

WORDS = {"junk": "ture", "blanks": " \t ", "signs": "\x1b[31m", "bytes": "\udcff", "long": "x" * 5000}
HOMELESS = {"no home": "~nobody-here/x"}
FILES = ("missing", "foreign", "empty", "directory", "pipe", "socket", "endless", "kernel log", "nested", "sparse")
KINDS = (*WORDS, *HOMELESS, *FILES)


def odd_value(folder: Path, kind: str) -> str:
    """A value of this kind; a file is made in the folder, and has blanks around its name."""
    return (WORDS | HOMELESS).get(kind) or f" {odd_file(folder, kind)} "


def odd_file(folder: Path, kind: str, suffix: str = "") -> Path:
    """A path of this kind, which ends so."""
    path = folder / f"{kind}{suffix}"
    match kind:
        case "foreign":
            path.write_text("Dear Sir or Madam\n")
        case "empty":
            path.touch()
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "endless":
            path.symlink_to("/dev/zero")
        case "kernel log":
            path.symlink_to("/proc/kmsg")
        case "nested":
            path.write_text('{"a":' * 50_000)
        case "sparse":
            path.touch()
            os.truncate(path, 20 << 30)
    return path
