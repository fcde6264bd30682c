"""Reading a results document (the format is in db/exchange.py) that a stranger may have written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from blocktune.db.exchange import FORMAT, FORMAT_VERSION
from blocktune.db.records import Best, Environment, Outcome, Telemetry, Trial
from blocktune.db.untrusted import Untrusted
from blocktune.kernels.config import KernelConfig, Origin
from blocktune.kernels.device import DeviceSpec
from blocktune.kernels.resources import KernelResources
from blocktune.kernels.shape import AttentionShape

MAX_ENVIRONMENTS = 1000
MAX_BESTS = 20_000
MAX_TRIALS = 200_000
MAX_SAMPLES = 10_000
MAX_TIME_US = 1e10  # nearly three hours for one call
MAX_INT = 2**31 - 1
EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)  # before Triton could be tuned
_DIGEST = "[0-9a-f]{16}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCounts:
    """What an import stored, and what it left as it was because the store held better or younger rows."""

    bests: int
    bests_kept: int
    trials: int
    trials_kept: int


def records_from(document: Any) -> tuple[list[Best], list[Trial]]:
    """The records in a document, every field of which was checked.

    Raises:
        ImportRejectedError: naming the place, the value and the rule.
    """
    top = Untrusted(document).object(("format", "schema", "device", "environments", "bests"), ("trials",))
    top["format"].match(FORMAT, f"`{FORMAT}`")
    top["schema"].integer(1, FORMAT_VERSION)
    device = top["device"].parsed(DeviceSpec.from_json, "a device")
    source = _Source(device, _environments(top["environments"]), datetime.now(UTC) + timedelta(days=1))
    bests = [source.best(item) for item in top["bests"].items(MAX_BESTS)]
    trials = [source.trial(item) for item in top["trials"].items(MAX_TRIALS)] if "trials" in top else []
    return bests, trials


def _environments(node: Untrusted) -> dict[str, Environment]:
    found = {}
    for digest, entry in node.entries(MAX_ENVIRONMENTS).items():
        parts = entry.object(("triton", "ptxas", "torch", "cuda", "driver", "protocol", "power_limit_w"))
        environment = Environment(
            **{name: parts[name].text() for name in ("triton", "ptxas", "torch", "cuda", "driver")},
            protocol=parts["protocol"].integer(0, MAX_INT),
            power_limit_w=parts["power_limit_w"].integer(0, 100_000),
        )
        if environment.digest != digest:
            entry.reject(f"the environment with this digest (these values have {environment.digest})")
        found[digest] = environment
    return found


@dataclass(frozen=True, slots=True)
class _Source:
    """Reads the rows of one document. `latest` bounds their dates: one far ahead would outrank all that is measured
    later."""

    device: DeviceSpec
    environments: dict[str, Environment]
    latest: datetime

    def best(self, node: Untrusted) -> Best:
        parts = node.object((*_PROVENANCE, "origin"), _BEST_READERS)
        origin = parts["origin"].parsed(Origin, f"one of {', '.join(Origin)}")
        if origin is Origin.MEASURED and "time_us" not in parts:
            node.reject("an object with `time_us`, since its origin is `measured`")
        return Best(**self._provenance(parts), origin=origin, **_read(parts, _BEST_READERS))

    def trial(self, node: Untrusted) -> Trial:
        parts = node.object((*_PROVENANCE, "outcome"), _TRIAL_READERS)
        outcome = parts["outcome"].parsed(Outcome, f"one of {', '.join(Outcome)}")
        if (outcome is Outcome.OK) != ("time_us" in parts):
            node.reject("an object that has `time_us` exactly when its outcome is `ok`")
        return Trial(**self._provenance(parts), outcome=outcome, **_read(parts, _TRIAL_READERS))

    def _provenance(self, parts: dict[str, Untrusted]) -> dict[str, Any]:
        digest = parts["environment"].match(_DIGEST, "an environment's digest")
        if digest not in self.environments:
            parts["environment"].reject("a digest that `environments` explains")
        return {
            "device": self.device,
            "environment": self.environments[digest],
            "shape": _shape(parts["shape"]),
            "config": _config(parts["config"]),
            "kernel_hash": parts["kernel_hash"].match(_DIGEST, "16 hexadecimal digits"),
            "created_at": parts["created_at"].moment(EARLIEST, self.latest),
        }


_Readers = Mapping[str, Callable[[Untrusted], Any]]
_PROVENANCE = ("shape", "config", "kernel_hash", "environment", "created_at")


def _read(parts: dict[str, Untrusted], readers: _Readers) -> dict[str, Any]:
    """The optional fields that are there."""
    return {name: read(parts[name]) for name, read in readers.items() if name in parts}


def _ratio(node: Untrusted) -> float:
    return node.number(1e-6, 1e6)


def _seconds(node: Untrusted) -> float:
    return node.number(0, 1e7)


def _time(node: Untrusted) -> float:
    return node.number(1e-3, MAX_TIME_US)


def _shape(node: Untrusted) -> AttentionShape:
    shape = node.parsed(AttentionShape.from_json, "a shape")
    if max(value for value in shape.to_json().values() if type(value) is int) > MAX_INT:
        node.reject(f"a shape with sizes up to {MAX_INT}")
    return shape


def _config(node: Untrusted) -> KernelConfig:
    config = node.parsed(KernelConfig.from_json, "a config")
    if len(config.extra) > 8:
        node.reject("a config with up to 8 parameters of the kernel's own")
    return config


def _resources(node: Untrusted) -> KernelResources:
    counts = ("registers", "shared_bytes", "static_shared_bytes", "stack_bytes", "spill_bytes", "num_warps", "barriers")
    parts = node.object((*counts, "tensor_cores", "code_sha256"))
    return KernelResources(
        **{name: parts[name].integer(0, MAX_INT) for name in counts},
        tensor_cores=parts["tensor_cores"].match("[a-z0-9_]{1,32}", "the name of an instruction or `none`"),
        code_sha256=parts["code_sha256"].match("([0-9a-f]{64})?", "64 hexadecimal digits or empty"),
    )


def _telemetry(node: Untrusted) -> Telemetry:
    highest = {
        "sm_clock_mhz": 100_000,
        "memory_clock_mhz": 100_000,
        "temperature_c": 1000,
        "throttle_reasons": 2**63 - 1,
        "other_processes": 1_000_000,
    }
    parts = node.object((), (*highest, "power_w"))
    power_w = parts["power_w"].number(0, 100_000) if "power_w" in parts else None
    return Telemetry(
        power_w=power_w, **{name: parts[name].integer(0, limit) for name, limit in highest.items() if name in parts}
    )


_BEST_READERS: _Readers = {
    "time_us": _time,
    "predicted_us": _time,
    "default": _config,
    "default_time_us": _time,
    "paper": _config,
    "paper_time_us": _time,
    "speedup_over_default": _ratio,
    "speedup_low": _ratio,
    "speedup_high": _ratio,
    "trials": lambda node: node.integer(0, MAX_INT),
}

_TRIAL_READERS: _Readers = {
    "resources": _resources,
    "blocks_per_sm": lambda node: node.integer(0, 1024),
    "occupancy": lambda node: node.number(0, 1),
    "limiters": lambda node: tuple(item.match("[a-z_]{1,32}", "the name of a limit") for item in node.items(16)),
    "predicted_us": _time,
    "time_us": _time,
    "relative_to_anchor": _ratio,
    "samples_us": lambda node: tuple(_time(item) for item in node.items(MAX_SAMPLES)),
    "error": lambda node: node.text(1_000_000),
    "compile_seconds": _seconds,
    "bench_seconds": _seconds,
    "telemetry": _telemetry,
}
