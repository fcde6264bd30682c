"""The code of a config, as far as models ask about it: its resources and its accesses of shared memory banks."""

from dataclasses import dataclass

from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """The compiled code of a config.

    resources: what a block takes. shared: how the loop of its products reads shared memory; None where this was not
    counted, which only products on tensor cores allow: those on plain arithmetic load every operand, so that a time
    without the conflicts of their banks would be another prediction.

    Raises:
        UsageError: the products run without tensor cores, and their accesses were not counted.
    """

    resources: KernelResources
    shared: SharedAccesses | None

    def __post_init__(self) -> None:
        if self.shared is None and needs_accesses(self.resources):
            raise UsageError(
                "`shared` must be given where products run without tensor cores, but got None. Compile the config to "
                "count its accesses of shared memory."
            )

    @classmethod
    def recorded(cls, resources: KernelResources | None) -> "CompiledCode | None":
        """Return the code of a recorded trial, which keeps resources alone; None where it has none, or they do not
        do."""
        return None if resources is None or needs_accesses(resources) else cls(resources, None)


def needs_accesses(resources: KernelResources) -> bool:
    """Return whether a prediction depends on how the loop reads shared memory."""
    return resources.tensor_cores == "none"
