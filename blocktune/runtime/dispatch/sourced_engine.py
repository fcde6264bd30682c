"""The source of an engine, and what has been decided from it so far."""

import os
import threading
from typing import Any

from torch import Tensor

from blocktune.kernels.files.signature import trusted_key, warn_of_unused_key
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import Direction
from blocktune.runtime.dispatch.call import Call, PlanUse
from blocktune.runtime.dispatch.launches.plans import Plan, TorchPlan
from blocktune.runtime.dispatch.resolver import Resolver
from blocktune.runtime.dispatch.snapshot import Snapshot
from blocktune.runtime.store_reader.background import MAX_SECONDS
from blocktune.runtime.store_reader.sources import ConfigSource, default_source, require_source

FOR_KERNELS = PlanUse(sums=True)
"""A plan whose calls PyTorch computes only where no kernel of ours does."""


class SourcedEngine:
    """An engine's source, which can be read again, and its resolver. Threads may share it, and it survives a fork.

    Raises:
        UsageError: `source` is no source, such as a path.
    """

    def __init__(self, source: ConfigSource | None = None, *, strict: bool = False) -> None:
        self._strict = strict
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._source = default_source() if source is None else source
        require_source(self._source)
        self._begin(self._snapshot())

    @property
    def source(self) -> ConfigSource:
        """Where configs come from."""
        return self._source

    @property
    def strict(self) -> bool:
        """Whether only exact measurements are taken."""
        return self._strict

    @property
    def resolver(self) -> Resolver:
        """What has been decided so far; another one takes its place when configs have come."""
        return self._resolver

    def use(self, source: ConfigSource) -> None:
        """Take configs from this source from now on, and forget all plans. Waits as `reload` does.

        Raises:
            UsageError: it is no source.
        """
        require_source(source)
        self._source = source
        self.reload()

    def reload(self) -> None:
        """Read the source again for the devices seen so far, then forget all plans.

        Waits for what is read, up to `MAX_SECONDS`. Calls in other threads go on with what they have meanwhile.
        """
        snapshot = self._snapshot()
        for device in self._resolver.snapshot.devices:
            snapshot.begin(device)
        for device in snapshot.devices:
            snapshot.table(device, MAX_SECONDS)
        self._begin(snapshot)

    def _snapshot(self) -> Snapshot:
        """Return a new snapshot of the source; a strict dispatcher takes signed files alone if the user has named a
        key."""
        key = trusted_key()
        if key is not None and not self._strict:
            warn_of_unused_key(key)
        return Snapshot(self._source, self._renew, key if self._strict else None)

    def _begin(self, snapshot: Snapshot) -> None:
        with self._miss_lock():
            self._resolver = Resolver(snapshot, strict=self._strict)
            self._checked: set[Any] = set()  # kinds of calls whose values were looked at

    def _renew(self, snapshot: Snapshot) -> None:
        """Forget the plans if they were made without what has been read since. Any thread may call it."""
        with self._miss_lock():
            if self._resolver.snapshot is snapshot and self._resolver.late != snapshot.late:
                self._resolver = self._resolver.renew()

    def _settle(self, device: DeviceSpec | int | None) -> None:
        """Wait until the source is read for a device, or the one with a CUDA index, up to `MAX_SECONDS`: what is
        decided then stays. None is the current device."""
        with self._miss_lock():
            snapshot = self._resolver.snapshot
            spec = device if isinstance(device, DeviceSpec) else self._resolver.device(device)
            configs = snapshot.begin(spec) if isinstance(spec, DeviceSpec) else None
        if configs is not None:
            configs.rows(MAX_SECONDS)  # without the lock: calls go on meanwhile
            self._renew(snapshot)

    def plan(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, direction: Direction, use: PlanUse = FOR_KERNELS
    ) -> Plan:
        """Return the plan of one direction."""
        place = call.plan_key(query, key, value, direction, use)
        plan = self._resolver.plans.get(place)
        if plan is None:
            with self._miss_lock():
                resolver = self._resolver
                plan = resolver.plans.get(place) or resolver.resolve(place, query, key, value, call, direction, use)
        return plan

    def torch_plan(self, reason: str) -> TorchPlan:
        """Return the plan of calls that are PyTorch's for a reason that does not depend on configs."""
        plan = self._resolver.plans.get(reason)
        if isinstance(plan, TorchPlan):
            return plan
        with self._miss_lock():
            return self._resolver.torch_plan(reason)

    def _miss_lock(self) -> threading.RLock:
        """Return the lock that only misses take. A forked child may have inherited it locked by a thread that it does
        not have."""
        if os.getpid() != self._pid:
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock
