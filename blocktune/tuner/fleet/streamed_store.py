"""A worker's store where it cannot reach the one of the run: a file of its own, whose records are sent to the driver.

Records travel as the documents that `tune export` writes, with the GPU that made them:

    {"document": {...}, "gpu": "GPU-..."}
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from blocktune.db.exchange.document import document_from
from blocktune.db.exchange.importing import records_in
from blocktune.db.records.records import AnyBest, AnyTrial
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.fleet.job import Job

Packed = Mapping[str, Any]
Send = Callable[[dict[str, Any]], None]


def pack_records(device: DeviceSpec, trials: Sequence[AnyTrial], bests: Iterable[AnyBest] = ()) -> Packed:
    """Return records of one GPU as plain values."""
    return {"document": document_from(device, bests, trials), "gpu": device.uuid}


def unpack_records(message: Packed) -> tuple[list[AnyTrial], list[AnyBest]]:
    """Return the records that `pack_records` described.

    Raises:
        ImportRejectedError: a field breaks a rule.
    """
    bests, trials = records_in(message["document"])
    gpu = message["gpu"]
    return (
        [replace(trial, device=replace(trial.device, uuid=gpu)) for trial in trials],
        [replace(best, device=replace(best.device, uuid=gpu)) for best in bests],
    )


def relevant_records(store: ResultStore, job: Job) -> tuple[Packed, ...]:
    """Return what a search of the job reads from a store: trials of its shape, and the winners of near ones. Imported
    trials do not count as made, so they stay. Of a call of an autotuned kernel nothing is read: only its worker can
    make the call, and knows its problem then."""
    device = next((device for device in store.devices() if device.key == job.device), None)
    if device is None or not isinstance(job.shape, AttentionShape):
        return ()
    trials = [trial for trial in store.trials(device, job.shape) if not trial.imported]
    return (pack_records(device, trials, store.nearest(device, job.shape)),)


class StreamedStore(ResultStore):
    """A store that sends each record once it has stored it."""

    send: Send

    def put_all(self, trials: Iterable[AnyTrial], bests: Iterable[AnyBest]) -> None:
        kept_trials, kept_bests = tuple(trials), tuple(bests)
        super().put_all(kept_trials, kept_bests)
        for trial in kept_trials:
            self.send({"records": pack_records(trial.device, [trial])})
        for best in kept_bests:
            self.send({"records": pack_records(best.device, [], [best])})

    def set_best(self, best: AnyBest) -> bool:
        stored = super().set_best(best)
        if stored:
            self.send({"records": pack_records(best.device, [], [best])})
        return stored

    def with_timeout(self, lock_timeout_seconds: float) -> Self:
        other = super().with_timeout(lock_timeout_seconds)
        other.send = self.send
        return other


@contextmanager
def store_of(job: Job, send: Send) -> Iterator[ResultStore]:
    """Yield the job's store: the one of the run or, where the job brings what is known, one of its own."""
    if job.known is None:
        with ResultStore.open(job.database) as store:
            yield store
        return
    with tempfile.TemporaryDirectory(prefix="blocktune-") as folder, StreamedStore.open(Path(folder) / "job.db") as own:
        own.send = send
        for message in job.known:
            ResultStore.put_all(own, *unpack_records(message))  # the driver has them, so they are not sent
        yield own
