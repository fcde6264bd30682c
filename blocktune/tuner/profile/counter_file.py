"""Counters with the config that they are of: what `tune profile --out` writes and a report reads.

    file = CounterFile(analysis, text)
    path.write_text(file.text())                      # NAME.counters.csv
    CounterFile.parse(path.read_text()).rows()        # every prediction next to its counter, without a compile

The first line says in JSON what ran and what its compiled code takes; the CSV of Nsight Compute follows. Predictions
are made when the file is read, by the models of that day.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.analysis import Analysis, analyse
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from blocktune.tuner.profile.comparison import Row, Stall, comparison, stalls_of
from blocktune.tuner.profile.counters import Counters, plain_table
from blocktune.tuner.profile.nsight_compute import read_counters

SUFFIX = ".counters.csv"
"""How the names of such files end."""

FORMAT, SCHEMA = "blocktune-counters", 1
_MARK = "# "


@dataclass(frozen=True, slots=True)
class CounterFile:
    """One config on one device, with the counters of one call. recorded_on: the date; empty where unknown."""

    analysis: Analysis
    csv: str
    recorded_on: str = ""

    @property
    def counters(self) -> Counters:
        return Counters.parse(self.csv)

    def rows(self) -> tuple[Row, ...]:
        """Return every prediction next to its counter."""
        return comparison(self.analysis, self.counters)

    def stalls(self) -> tuple[Stall, ...]:
        """Return the reasons for which warps waited, the most frequent first."""
        return stalls_of(self.analysis, self.counters)

    def text(self) -> str:
        """Return what the file holds."""
        found = self.analysis
        head = {
            "format": FORMAT,
            "schema": SCHEMA,
            "recorded_on": self.recorded_on,
            "device": found.device.to_json() | {"uuid": None},
            "shape": found.shape.to_json(),
            "config": found.config.to_json(),
            "resources": found.occupied.resources.to_json(),
            "shared": found.shared and found.shared.to_json(),
        }
        return f"{_MARK}{json.dumps(head)}\n{plain_table(self.csv)}"

    @staticmethod
    def names_config(text: str) -> bool:
        """Return whether a text begins with the line that says of which config it is."""
        return text.startswith(_MARK)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what is in a file.

        Raises:
            UsageError: it cannot be read, holds no counters, or does not say of what they are.
        """
        return cls.parse(read_counters(path), path.name)

    @classmethod
    def parse(cls, text: str, name: str = "it") -> Self:
        """Return what a file holds.

        Args:
            text: of the file.
            name: of the file, for messages.

        Raises:
            UsageError: it holds no counters, or does not say of what they are.
        """
        head, _, csv = text.partition("\n")
        if not cls.names_config(text):
            raise UsageError(
                f"The first line of {name} does not name the config of its counters. Add it: tune profile FLAGS "
                f"--from FILE --out NAME{SUFFIX}, with the flags of the config."
            )
        Counters.parse(csv)
        try:
            data = json.loads(head.removeprefix(_MARK))
            return cls(_analysis(data), csv, str(data["recorded_on"]))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"The first line of {name} is not the JSON that `tune profile --out` writes: {type(error).__name__} "
                f"{error}. Write it again, or leave it out."
            ) from error


def _analysis(data: dict[str, Any]) -> Analysis:
    """Return what the models of today say of the recorded config."""
    if (data["format"], data["schema"]) != (FORMAT, SCHEMA):
        raise ValueError(f"it must have format {FORMAT} and schema {SCHEMA}")
    config, shape = KernelConfig.from_json(data["config"]), AttentionShape.from_json(data["shape"])
    shared = data["shared"]
    return analyse(
        get_kernel(config.kernel),
        config,
        shape,
        DeviceSpec.from_json(data["device"]),
        CompiledCode(KernelResources(**data["resources"]), None if shared is None else SharedAccesses(**shared)),
    )
