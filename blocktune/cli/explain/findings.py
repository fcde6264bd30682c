"""The findings of `tune doctor`: facts, how they matter, and what to do about them."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a finding matters."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One fact. `meaning` and `fix` say what follows from it and what to do; empty where all is well."""

    name: str
    value: str
    level: Level = Level.OK
    meaning: str = ""
    fix: str = ""
