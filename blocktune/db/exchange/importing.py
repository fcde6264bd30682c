"""Reading a results document (the format is in db/exchange/document.py) that a stranger may have written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from blocktune.db.exchange.contribution import (
    is_contribution,
    require_unbroken_seal,
    results_in_contribution,
    with_vote,
)
from blocktune.db.exchange.document import FORMAT, FORMAT_VERSION, load_document
from blocktune.db.exchange.untrusted import Untrusted
from blocktune.db.exchange.votes import DAY, day_of
from blocktune.db.records.bounds import MAX_NAME, MAX_TEXT, POWER_W
from blocktune.db.records.records import (
    AnyBest,
    AnyTrial,
    Best,
    Environment,
    Outcome,
    Regime,
    Telemetry,
    Trial,
    of_attention,
)
from blocktune.kernels.files.checksums import CHECKSUM, DEVICE_CHECKSUM, checksum_of
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.column_kinds import Kind, Prose, Real, Several, Whole, Word, columns_of
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import ImportRejectedError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig
from blocktune.runtime.store_reader.export_file import exported_checksum, is_launch_problem

MAX_ENVIRONMENTS = 1000
MAX_BESTS = 20_000
MAX_TRIALS = 200_000
EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)  # before Triton could be tuned
_DIGEST = "[0-9a-f]{16}"


def records_in(document: Any) -> tuple[list[AnyBest], list[AnyTrial]]:
    """Return the winners and trials of all kernels in an export or contribution, every field of which was checked.

    Raises:
        ImportRejectedError: naming the place, the value and the rule.
    """
    if is_contribution(document):
        results, machine = results_in_contribution(document)
        bests, trials = _exported_records(results)
        return [with_vote(best, machine) for best in bests], trials
    return _exported_records(document)


def _exported_records(document: Any) -> tuple[list[AnyBest], list[AnyTrial]]:
    """Return what `records_in` returns of an export."""
    top, source = _check_document(document)
    bests = [source.best(row) for row in top["bests"].items(MAX_BESTS)]
    return bests, [source.trial(row) for row in top["trials"].items(MAX_TRIALS)] if "trials" in top else []


def records_in_file(path: str | Path) -> tuple[list[AnyBest], list[AnyTrial]]:
    """Return what `records_in` returns of the document in a file.

    Raises:
        ImportRejectedError: naming the file too.
    """
    document = load_document(path)
    try:
        return records_in(document)
    except ImportRejectedError as error:
        raise ImportRejectedError(f"{path}: {error}") from error


def records_from(document: Any) -> tuple[list[Best], list[Trial]]:
    """Return the winners and trials of attention in a document; raises what `records_in` raises."""
    bests, trials = records_in(document)
    return of_attention(bests), of_attention(trials)


def _check_document(document: Any) -> "tuple[dict[str, Untrusted], _Source]":
    """Return the parts of a document whose seal is unbroken, and what reads its rows."""
    top = Untrusted(document).object(
        ("format", "schema", "device", "environments", "bests"), ("trials", "sha256", "signature", DEVICE_CHECKSUM)
    )
    top["format"].match(FORMAT, f"`{FORMAT}`")
    top["schema"].integer(1, FORMAT_VERSION)
    if "sha256" in top:
        require_unbroken_seal(document, top["sha256"])
    device = top["device"].parse_with(DeviceSpec.from_json, "a device")
    if DEVICE_CHECKSUM in top:
        checksum = checksum_of(top["device"].value)
        top[DEVICE_CHECKSUM].match(
            checksum, "the checksum of `device`; leave it out where the device was changed on purpose"
        )
    return top, _Source(device, _environments(top["environments"]), datetime.now(UTC) + timedelta(days=1))


def _environments(node: Untrusted) -> dict[str, Environment]:
    found = {}
    for digest, entry in node.entries(MAX_ENVIRONMENTS).items():
        parts = entry.object(("triton", "ptxas", "torch", "cuda", "driver", "protocol", "power_limit_w"), ("regime",))
        environment = Environment(
            **{name: parts[name].text(MAX_TEXT) for name in ("triton", "ptxas", "torch", "cuda", "driver")},
            protocol=_value(Whole(), parts["protocol"]),
            power_limit_w=_value(POWER_W, parts["power_limit_w"]),
            regime=_regime(parts["regime"]) if "regime" in parts else Regime.SUSTAINED,
        )
        if environment.digest != digest:
            entry.reject(f"the environment with this digest (these values have {environment.digest})")
        found[digest] = environment
    return found


@dataclass(frozen=True, slots=True)
class _Source:
    """Reads the rows of one document. `latest` bounds their dates: one far ahead would outrank all that is measured
    later. problems: those that were read, by the object in the document, which rows of a sweep share."""

    device: DeviceSpec
    environments: dict[str, Environment]
    latest: datetime
    problems: dict[int, AttentionShape | KernelProblem] = field(default_factory=dict)

    def best(self, node: Untrusted) -> AnyBest:
        parts = node.object((*_PROVENANCE, "origin"), (*_OTHER_CONFIGS, *_BEST_READERS, CHECKSUM))
        own = self._problem_and_configs(parts)
        origin = parts["origin"].parse_with(Origin, f"one of {', '.join(Origin)}")
        if isinstance(own["shape"], KernelProblem) and origin is not Origin.MEASURED:
            parts["origin"].reject(f"`{Origin.MEASURED}`, as that of every winner of an autotuned kernel is")
        if origin is Origin.MEASURED and "time_us" not in parts:
            node.reject("an object with `time_us`, since its origin is `measured`")
        best = Best(**own, **self._provenance(parts), origin=origin, **_read(parts, _BEST_READERS))
        if any(day_of(vote) > f"{self.latest:{DAY}}" for vote in best.votes):
            parts["votes"].reject(f"votes of days until {self.latest:{DAY}}")
        self._require_unchanged(node, parts, best.environment)
        return best

    def trial(self, node: Untrusted) -> AnyTrial:
        parts = node.object((*_PROVENANCE, "outcome"), (*_TRIAL_READERS, CHECKSUM))
        outcome = parts["outcome"].parse_with(Outcome, f"one of {', '.join(Outcome)}")
        if (outcome is Outcome.OK) != ("time_us" in parts):
            node.reject("an object that has `time_us` exactly when its outcome is `ok`")
        own = self._problem_and_configs(parts)
        trial = Trial(**own, **self._provenance(parts), outcome=outcome, **_read(parts, _TRIAL_READERS))
        self._require_unchanged(node, parts, trial.environment)
        return trial

    def _require_unchanged(self, node: Untrusted, parts: dict[str, Untrusted], environment: Environment) -> None:
        if CHECKSUM in parts:
            checksum = exported_checksum(node.value, self.device.key, environment.to_json())
            parts[CHECKSUM].match(
                checksum, "the checksum of the row; leave it out of a row that was changed on purpose"
            )

    def _provenance(self, parts: dict[str, Untrusted]) -> dict[str, Any]:
        digest = parts["environment"].match(_DIGEST, "an environment's digest")
        if digest not in self.environments:
            parts["environment"].reject("a digest that `environments` explains")
        return {
            "device": self.device,
            "environment": self.environments[digest],
            "kernel_hash": parts["kernel_hash"].match(_DIGEST, "16 hexadecimal digits"),
            "created_at": parts["created_at"].moment(EARLIEST, self.latest),
        }

    def _problem_and_configs(self, parts: dict[str, Untrusted]) -> dict[str, Any]:
        """Return the shape of a row, or the problem of an autotuned kernel, with the configs for it."""
        node = parts["shape"]
        problem = self.problems.get(id(node.value))
        if problem is None:
            problem = self.problems[id(node.value)] = _problem(node)
        read = partial(_launch_config, kernel=problem.kernel) if isinstance(problem, KernelProblem) else _config
        return {"shape": problem} | {name: read(parts[name]) for name in ("config", *_OTHER_CONFIGS) if name in parts}


_Readers = Mapping[str, Callable[[Untrusted], Any]]
_PROVENANCE = ("shape", "config", "kernel_hash", "environment", "created_at")
_OTHER_CONFIGS = ("default", "paper")


def _read(parts: dict[str, Untrusted], readers: _Readers) -> dict[str, Any]:
    """Return the optional fields that are there."""
    return {name: read(parts[name]) for name, read in readers.items() if name in parts}


def _regime(node: Untrusted) -> Regime:
    return node.parse_with(Regime, f"one of {', '.join(Regime)}")


def _problem(node: Untrusted) -> AttentionShape | KernelProblem:
    if not is_launch_problem(node.value):
        return node.parse_with(AttentionShape.from_json, "a shape")
    node.object(("kernel", "problem"))["kernel"].text(MAX_NAME)
    return node.parse_with(KernelProblem.from_json, "the problem of a kernel")


def _launch_config(node: Untrusted, kernel: str) -> LaunchConfig:
    config = node.parse_with(LaunchConfig.from_json, "the config of a kernel")
    if config.kernel != kernel:
        node.reject(f"a config of {kernel}")
    return config


def _config(node: Untrusted) -> KernelConfig:
    config = node.parse_with(KernelConfig.from_json, "a config")
    if len(config.extra) > 8:
        node.reject("a config with up to 8 parameters of the kernel's own")
    return config


def _resources(node: Untrusted) -> KernelResources:
    return KernelResources(**_read(node.object(tuple(_RESOURCE_READERS)), _RESOURCE_READERS))


def _telemetry(node: Untrusted) -> Telemetry:
    return Telemetry(**_read(node.object((), _TELEMETRY_READERS), _TELEMETRY_READERS))


def _readers(record_type: type[Any]) -> _Readers:
    """Return what reads each measured value of a record."""
    return {column.name: partial(_value, column.kind) for column in columns_of(record_type)}


def _value(kind: Kind, node: Untrusted) -> Any:
    """Return a measured value, or reject what its column does not allow."""
    match kind:
        case Real():
            return node.number(kind.low, kind.high)
        case Whole():
            return node.integer(kind.low, kind.high)
        case Word():
            return node.match(kind.pattern, kind.meaning)
        case Prose():
            return node.prose(kind.longest)
        case Several(of=Real() as of):
            return node.numbers(kind.most, of.low, of.high)
        case Several():
            return tuple(_value(kind.of, item) for item in node.items(kind.most))


_RESOURCE_READERS: _Readers = _readers(KernelResources)
_TELEMETRY_READERS: _Readers = _readers(Telemetry)
_BEST_READERS: _Readers = _readers(Best)
_TRIAL_READERS: _Readers = {"resources": _resources, "telemetry": _telemetry, **_readers(Trial)}
