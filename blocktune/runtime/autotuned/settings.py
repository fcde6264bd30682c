"""How a kernel is tuned at a miss, besides what `triton.autotune` says of it."""

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from blocktune.kernels.files.variables import STRICT
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call_key import Bucket, power_of_two
from blocktune.runtime.autotuned.fallback import ACCEPTED
from blocktune.runtime.selection.ladder import Rung

if TYPE_CHECKING:
    from triton.runtime.autotuner import Autotuner


class Measuring(StrEnum):
    """Whether this process measures kinds of calls that nothing is known for."""

    ON = "on"
    BY_RANK_0 = "rank 0 measures it meanwhile"
    OFF = "the warm-up did not launch it"


_measuring = Measuring.ON

CostsOf = Callable[[Mapping[str, Any]], Mapping[str, float]]
Cache = Literal["cold", "warm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The choices that belong to blocktune.

    accept: the last source that serves a call without measuring.
    strict: a call that no such source serves is an error; nothing is tuned.
    isolate: candidates run in a child process, on copies of the arguments; one that crashes affects no other.
    l2: whether a launch is timed with a cold L2 cache, or right after the same launch.
    max_spill_bytes: a config whose threads spill more is not measured, unless all do.
    wait_seconds: how long a process waits for another one that tunes the same call.
    expand: how many configs besides the listed ones may be tried; 0 keeps to the list.
    buckets: groups of key values by the argument's name.
    costs: says what a launch moves and computes, by its arguments: `{"bytes": ..., "flops": ...}`.

    Raises:
        UsageError: a value is out of range.
    """

    accept: Rung = Rung.OTHER_COMPILER
    strict: bool = False
    isolate: bool = False
    l2: Cache = "cold"
    max_spill_bytes: int = 256
    wait_seconds: float = 120.0
    expand: int = 0
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    costs: CostsOf | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "accept", rung_named(self.accept))
        object.__setattr__(self, "buckets", buckets_named(self.buckets))
        if self.l2 not in ("cold", "warm"):
            raise UsageError(f"`l2` must be 'cold' or 'warm', but got {self.l2!r}.")
        if self.isolate and self.expand:
            raise UsageError(
                "`expand` and `isolate` cannot be combined, since `expand` runs new configs in this process. Leave one "
                "of them out."
            )
        for name, kind in (("max_spill_bytes", int), ("wait_seconds", int | float), ("expand", int)):
            value = getattr(self, name)
            if not isinstance(value, kind) or not value >= 0:
                word = "an integer" if kind is int else "a number"
                raise UsageError(f"`{name}` must be {word} of at least 0, but got {value!r}.")
        if self.costs is not None and not callable(self.costs):
            raise UsageError(
                f"`costs` must be a function of the arguments, but got {self.costs!r:.200}. For example: "
                '`costs=lambda named: {"bytes": 2 * named["n"]}`.'
            )

    def of_environment(self) -> "Settings":
        """Return these settings, strict where the environment says so."""
        return replace(self, strict=True) if STRICT.is_on() else self


def set_measuring(measuring: Measuring) -> None:
    """Say for the whole process, all of its threads, whether it measures from now on."""
    global _measuring
    _measuring = measuring


def measuring() -> Measuring:
    """Return whether this process measures."""
    return _measuring


def method_digest(settings: Settings, tuner: "Autotuner") -> str:
    """Return 12 hexadecimal digits of how a kernel's configs are measured: state of the L2 cache, bound of spills,
    isolation, and the sources of its author's benchmark and hooks. Empty where all of it is as usual."""
    usual, names = Settings(), ("l2", "max_spill_bytes", "isolate")
    parts = [f"{name} {getattr(settings, name)}" for name in names if getattr(settings, name) != getattr(usual, name)]
    hooks = {config.pre_hook for config in tuner.configs}
    hooks |= {tuner.pre_hook} if tuner.user_defined_pre_hook else set()
    hooks |= {tuner.post_hook} if tuner.user_defined_post_hook else set()
    hooks |= {tuner._do_bench} if brings_its_own_bench(tuner) else set()
    parts += sorted({_source_of(hook) for hook in hooks if hook is not None})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12] if parts else ""


def brings_its_own_bench(tuner: "Autotuner") -> bool:
    """Return whether a kernel was decorated with `do_bench`; Triton makes one of its own of the older `warmup` and
    `rep`."""
    older = tuner.num_warmups is not None or tuner.num_reps is not None or tuner.use_cuda_graph
    return tuner._do_bench is not None and not older


def _source_of(hook: Callable[..., Any]) -> str:
    """Return the source of a hook, or its name where there is none."""
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(hook)))
    except (OSError, TypeError):
        return getattr(hook, "__qualname__", type(hook).__qualname__)


def rung_named(name: str) -> Rung:
    """Return the source with a name.

    Raises:
        UsageError: no call can be accepted down to it.
    """
    if name not in ACCEPTED:
        raise UsageError(f"`accept` must be one of {', '.join(ACCEPTED)}, but got {name!r}.")
    return Rung(name)


def buckets_named(given: Mapping[str, Bucket | str]) -> dict[str, Bucket]:
    """Return the groups of key values by the argument's name, with functions for names.

    Raises:
        UsageError: they are no mapping, or one is neither a function nor `power_of_two`.
    """
    if not isinstance(given, Mapping):
        raise UsageError(f'`buckets` must be groups by name, but got {given!r}. Write {{"n": "power_of_two"}}.')
    return {name: _bucket(name, bucket) for name, bucket in given.items()}


def _bucket(name: str, bucket: Bucket | str) -> Bucket:
    if not isinstance(bucket, str) and callable(bucket):
        return bucket
    if bucket != "power_of_two":
        raise UsageError(f"The bucket of `{name}` must be a function or 'power_of_two', but got {bucket!r}.")
    return power_of_two
