"""A Ray cluster as a fleet: how to reach it, and which kinds of GPU its nodes say they have.

A node says so by a custom resource for each kind of GPU, as many as it has. `blocktune devices --ray` prints it:

    ray start --address=head:6379 --resources="$(blocktune devices --ray)"

Ray places a job by its kind and gives it any GPU of the node, so a node has GPUs of one kind. The name of a resource is
that of the device with its compute capability and its number of SMs: `blocktune:nvidia h200|9.0|132`.
"""

import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec, device_named, present_devices
from blocktune.kernels.values.errors import BlocktuneError, NoDeviceError, UsageError, needing

PREFIX = "blocktune:"

ANY = "any"
"""In place of a device's name: every kind of GPU that is present."""

CONNECT_SECONDS = 10.0

OBJECT_STORE_BYTES = 100 << 20
"""For each GPU of a Ray that is started for one run: the code of three jobs. Jobs and results pass it by."""


def kind_resource(kind: str) -> str:
    """Return the name of Ray's resource for a kind of GPU, which is `DeviceSpec.key`."""
    return PREFIX + kind


def resources_of(devices: Iterable[DeviceSpec]) -> dict[str, int]:
    """Return the resources of a node with these GPUs."""
    return dict(Counter(kind_resource(device.key) for device in devices))


def kinds_in(nodes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many GPUs of each kind the living nodes have, by what `ray.nodes()` says."""
    found: Counter[str] = Counter()
    for node in nodes:
        if node["Alive"]:
            found.update(_kinds_of(node))
    return dict(found)


def chosen_kinds(present: Mapping[str, int], name: str | None) -> list[str]:
    """Return the kinds of GPU that shapes are tuned for.

    Args:
        present: kinds that the cluster has.
        name: of a device, also of one that may join later; `ANY` is every kind, None the only one.

    Raises:
        NoDeviceError: the cluster has none.
        UsageError: it has several, and none is named.
        UnknownDeviceError: no device has this name.
    """
    if name not in (None, ANY):
        return [device_named(str(name)).key]
    if not present:
        raise NoDeviceError(
            "No node of the cluster says which GPUs it has. Start nodes by "
            '`ray start --resources="$(blocktune devices --ray)"`, or name the device that will join by --device.'
        )
    if name is None and len(present) > 1:
        raise UsageError(
            f"The cluster has several kinds of GPU: {', '.join(sorted(present))}. Name one by --device, or all by "
            f"`--device {ANY}`."
        )
    return sorted(present)


def spare_processors(nodes: Iterable[Mapping[str, Any]]) -> int:
    """Return how many processors the living nodes have besides one for each GPU, whose host process needs it."""
    alive = (node["Resources"] for node in nodes if node["Alive"])
    return sum(max(0, int(resources.get("CPU", 0) - resources.get("GPU", 0))) for resources in alive)


def silent_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the addresses of living nodes that have GPUs and do not say of which kind."""
    alive = (node for node in nodes if node["Alive"])
    return [node["NodeManagerAddress"] for node in alive if node["Resources"].get("GPU") and not _kinds_of(node)]


def processors_of(nodes: Iterable[Mapping[str, Any]], node_id: str) -> int:
    """Return each GPU's part of a node's processors; 1 where the node is not known."""
    for node in nodes:
        if node["NodeID"] == node_id:
            resources = node["Resources"]
            return max(1, int(resources.get("CPU", 1) // max(1, resources.get("GPU", 1))))
    return 1


@contextmanager
def connect_cluster(address: str | None) -> Iterator[None]:
    """Connect this process to the cluster at an address, `auto` for the one of this machine; None starts one for this
    machine's GPUs, which ends with the block.

    Raises:
        UsageError: Ray is missing, or no cluster answers at the address.
        NoDeviceError: Ray would be started here, where there is no GPU.
    """
    with needing("ray", "`--executor ray`"):
        import ray
    _connect(address)
    # Ray prints each retry on stdout, where results are; `log_to_driver` does not concern that
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "namespace": "blocktune"}
    try:
        if address is not None:
            _require_answer(address)
        ray.init(**(_own_cluster() if address is None else {"address": address}), **quiet)
    except BlocktuneError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        cluster = "A new Ray cluster" if address is None else f"The Ray cluster {address}"
        raise UsageError(
            f"{cluster} does not answer: {error}. Name a running one by `--address`, such as auto or host:6379."
        ) from error


def _require_answer(address: str) -> None:
    """Check that something listens at a host and port: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def _own_cluster() -> dict[str, Any]:
    """Return the arguments that start Ray for the GPUs of this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    devices = present_devices()
    if not devices:
        raise NoDeviceError(
            "This machine has no GPU that `--executor ray` could start Ray for. Name a cluster by --address."
        )
    return {
        "address": "local",
        "include_dashboard": False,
        "num_gpus": len(devices),
        "object_store_memory": OBJECT_STORE_BYTES * len(devices),
        "resources": resources_of(devices),
    }


def _kinds_of(node: Mapping[str, Any]) -> dict[str, int]:
    return {
        name.removeprefix(PREFIX): int(count) for name, count in node["Resources"].items() if name.startswith(PREFIX)
    }
