"""The same configs on every rank.

Ranks that look into stores of their own may choose different configs for the same shape, and with them different
rounding, different speed, and in collectives a deadlock. `sync_configs` lets rank 0 decide once and proves that all
agree; it never tunes. Documents travel as JSON in tensors: nothing that a rank sends is executed by another.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from blocktune.kernels.files.signature import trusted_key
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.registry import competing
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.frozen import checked, known_rows, take
from blocktune.runtime.autotuned.kernel import forget_choices
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.snapshot import read_rows_within
from blocktune.runtime.store_reader.provenance import Reuse, ptxas_version, triton_version
from blocktune.runtime.store_reader.tuned_config import TunedConfig

logger = logging.getLogger("blocktune")

ProcessGroup = Any
"""torch.distributed.ProcessGroup; None is the default group."""

ANSWER_BYTES = 4096
"""What a rank tells the others, in JSON."""

MAX_PROBLEM = 600
"""ASCII characters of a problem, each of which JSON may spell with 6 bytes."""


@dataclass(frozen=True, slots=True)
class SyncedConfigs:
    """The configs that rank 0 recommends for one kind of device, by its `DeviceSpec.key`; a source for a
    `Dispatcher`."""

    device_key: str
    rows: tuple[TunedConfig, ...]

    def configs(self, device: DeviceSpec) -> tuple[TunedConfig, ...]:
        return self.rows if device.key == self.device_key else ()

    def to_json(self) -> dict[str, Any]:
        return {"device": self.device_key, "rows": [_row_to_json(row) for row in self.rows]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SyncedConfigs":
        return cls(data["device"], tuple(_row_from_json(row) for row in data["rows"]))


def sync_configs(group: ProcessGroup = None, *, dispatcher: Dispatcher = attention) -> str:
    """Let rank 0 of the group decide which configs all its ranks dispatch with from now on, and return their hash.

    Rank 0 reads its sources for its current device, in up to `MAX_SECONDS` of stored/background.py, and broadcasts what
    they recommend. Every rank puts that in place of its own sources, for this kind of device, and forgets its
    plans. What rank 0's store knows of autotuned kernels is sent along, and precedes what a rank's own store knows.
    Before any of that, the ranks compare hashes of recommendations, device, kernels and compiler. Every rank of the
    group must call this; tensors travel on the CPU, or on the current GPU where the group's backend is NCCL.

    Raises:
        UsageError: torch.distributed is not initialised, a rank has no GPU or cannot read what rank 0 sent, or ranks
            differ. All ranks raise it, and keep the sources that they had.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "`sync_configs` needs an initialised process group, but there is no group. "
            "Call torch.distributed.init_process_group first; one process alone needs no synchronising."
        )
    decided = _decision(dispatcher) if dist.get_rank(group) == 0 else {}
    sent = _broadcast(decided, group)
    synced, answer = _receive(sent, dispatcher.strict)
    _require_agreement(gather_answers(answer, group))
    assert synced is not None  # otherwise this rank would have reported its problem
    dispatcher.use(synced)
    take(sent["autotuned"])
    forget_choices()
    return answer["digest"]


def _decision(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return what rank 0 sends: its recommendations, or why it has none, so that no other rank waits for them."""
    try:
        device = current_device()
        rows, problems = read_rows_within(
            dispatcher.source, device, signed_by=trusted_key() if dispatcher.strict else None
        )
        for problem in problems:
            logger.warning("%s", problem)
        return SyncedConfigs(device.key, tuple(rows)).to_json() | {"autotuned": known_rows(device)}
    except Exception as error:  # sent to all ranks, which raise it
        return {"problem": error_text(error)}


def _receive(sent: dict[str, Any], strict: bool) -> tuple[SyncedConfigs | None, dict[str, str]]:
    """Return the recommendations of rank 0, and what this rank tells the others: their digest here, or its problem."""
    if "problem" in sent:
        return None, {"problem": sent["problem"], "digest": ""}
    try:
        synced = SyncedConfigs.from_json(sent)
        checked(sent["autotuned"])
        return synced, {"problem": "", "digest": config_digest(synced, current_device(), strict, sent["autotuned"])}
    except Exception as error:  # sent to all ranks, which raise it
        return None, {"problem": error_text(error), "digest": ""}


def error_text(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace").decode()
    return text[:MAX_PROBLEM]


def config_digest(synced: SyncedConfigs, device: DeviceSpec, strict: bool, autotuned: list[dict[str, Any]]) -> str:
    """Return a hash of all that decides which config a shape gets and what code that is."""
    decisive = {
        "configs": synced.to_json(),
        "autotuned": autotuned,
        "device": device.key,
        "limits": asdict(device.limits),
        "kernels": {kernel.name: kernel.source_hash for kernel in competing()},
        "triton": triton_version(),
        "ptxas": ptxas_version(device.limits.sm_arch),
        "strict": strict,
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _require_agreement(answers: list[dict[str, str]]) -> None:
    """Check that all ranks agree.

    Raises:
        UsageError: a rank has a problem, or not all digests are equal.
    """
    told = [answer["problem"] or answer["digest"] for answer in answers]
    if len(set(told)) == 1 and not answers[0]["problem"]:
        return
    by_rank = "; ".join(f"rank {rank}: {text.rstrip('.')}" for rank, text in enumerate(told))
    raise UsageError(
        "All ranks must have the same kind of device, kernels, triton, ptxas and strictness to dispatch alike, but "
        f"they report {by_rank}. Give all ranks the same GPU and the same versions, or call without synchronising."
    )


def _broadcast(sent: dict[str, Any], group: ProcessGroup) -> Any:
    """Return the JSON value that rank 0 of the group sends."""
    payload = json.dumps(sent).encode()
    size = torch.tensor([len(payload)], device=_tensor_device(group))
    dist.broadcast(size, group=group, group_src=0)
    content = _as_tensor(payload.ljust(int(size), b" ")[: int(size)], group)
    dist.broadcast(content, group=group, group_src=0)
    return json.loads(bytes(content.tolist()))


def gather_answers(answer: dict[str, str], group: ProcessGroup) -> list[Any]:
    """Return the answers of all ranks, in their order."""
    own = _as_tensor(json.dumps(answer).encode().ljust(ANSWER_BYTES), group)
    answers = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(answers, own, group=group)
    return [json.loads(bytes(each.tolist())) for each in answers]


def _as_tensor(content: bytes, group: ProcessGroup) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(_tensor_device(group))


def _tensor_device(group: ProcessGroup) -> torch.device:
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _row_to_json(row: TunedConfig) -> dict[str, Any]:
    return {
        "shape": row.shape.to_json(),
        "config": row.config.to_json(),
        "origin": str(row.origin),
        "time_us": row.time_us,
        "reuse": None if row.reuse is None else str(row.reuse),
    }


def _row_from_json(data: dict[str, Any]) -> TunedConfig:
    return TunedConfig(
        shape=AttentionShape.from_json(data["shape"]),
        config=KernelConfig.from_json(data["config"]),
        origin=Origin(data["origin"]),
        time_us=data["time_us"],
        reuse=None if data["reuse"] is None else Reuse(data["reuse"]),
    )
