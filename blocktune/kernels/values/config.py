"""How a kernel is cut into blocks: the values that the search chooses and the store keeps."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from blocktune.kernels.values.errors import UsageError

MIN_BLOCK, MAX_BLOCK = 16, 1024
MAX_STAGES = 16
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """A kernel's name and its block sizes.

    block_m counts query rows, a multiple of 16, and block_n key rows of a tile, a power of two. `extra` holds
    the kernel's own parameters as sorted (name, value) pairs.

    Raises:
        UsageError: a value is out of range; the bounds keep a hostile file from starting an endless compilation.
    """

    kernel: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    extra: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, str) or not _NAME.fullmatch(self.kernel):
            raise UsageError(
                "A kernel's name must consist of lower-case letters, digits and underscores, but got "
                f"{self.kernel!r:.80}."
            )
        if type(self.block_m) is not int or self.block_m % MIN_BLOCK or not 0 < self.block_m <= MAX_BLOCK:
            raise UsageError(
                f"`block_m` must be a multiple of {MIN_BLOCK} up to {MAX_BLOCK}, but got block_m={self.block_m!r:.80}."
            )
        for name, value, highest in (
            ("block_n", self.block_n, MAX_BLOCK),
            ("num_warps", self.num_warps, 32),
        ):
            if type(value) is not int or not _is_power_of_two(value) or value > highest:
                raise UsageError(f"`{name}` must be a power of two up to {highest}, but got {name}={value!r:.80}.")
        if type(self.num_stages) is not int or not 1 <= self.num_stages <= MAX_STAGES:
            raise UsageError(
                f"`1 <= num_stages <= {MAX_STAGES}` must hold, but got num_stages={self.num_stages!r:.80}."
            )
        object.__setattr__(self, "extra", tuple(sorted((name, value) for name, value in self.extra)))
        for name, value in self.extra:
            if not isinstance(name, str) or not _NAME.fullmatch(name) or type(value) is not int or abs(value) > 1 << 20:
                raise UsageError(
                    f"A kernel's own parameter must be a name and an integer, but got {name!r}={value!r:.80}."
                )

    @property
    def parameters(self) -> dict[str, int]:
        """All searched values by name: the four common ones, then the kernel's own."""
        common = {
            "block_m": self.block_m,
            "block_n": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }
        return common | dict(self.extra)

    @property
    def label(self) -> str:
        """A short name for people, such as `flash_fwd 128x64 w4 s3`."""
        own = "".join(f" {name}={value}" for name, value in self.extra)
        return f"{self.kernel} {self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}{own}"

    @classmethod
    def of(cls, kernel: str, parameters: dict[str, int]) -> Self:
        """Return the config with these parameters; names beyond the four common ones become `extra`."""
        own = dict(parameters)
        try:
            tile = {name: own.pop(name) for name in ("block_m", "block_n", "num_warps", "num_stages")}
        except KeyError as error:
            raise UsageError(
                f"A config needs block_m, block_n, num_warps and num_stages, but {error} is missing."
            ) from None
        return cls(kernel, **tile, extra=tuple(own.items()))

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel} | self.parameters

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the config that `to_json` wrote. Whether the kernel knows the extra names is the registry's question.

        Raises:
            UsageError: a value is missing or out of range.
        """
        if not isinstance(data, dict) or not isinstance(data.get("kernel"), str):
            raise UsageError(f"A config must be an object with a `kernel` name, but got {data!r:.80}.")
        return cls.of(data["kernel"], {name: value for name, value in data.items() if name != "kernel"})


class Origin(StrEnum):
    """Where a config comes from, best first. Always shown, never blurred."""

    MEASURED = "measured"
    COMMUNITY = "community"
    """Borrowed, and at least two contributed machines with this kind of GPU agree on it."""
    BORROWED = "borrowed"
    PREDICTED = "predicted"
    DEFAULT = "default"
