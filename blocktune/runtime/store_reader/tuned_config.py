"""The recommendation of a config source for a shape."""

from dataclasses import dataclass
from typing import Any, Generic

from typing_extensions import TypeVar

from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.provenance import Reuse

ProblemT = TypeVar("ProblemT", bound=Any, default=AttentionShape)
ConfigT = TypeVar("ConfigT", bound=Any, default=KernelConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedConfig(Generic[ProblemT, ConfigT]):
    """The config that a source recommends for one shape on one device; of attention unless the types say otherwise.

    time_us is None unless it was measured. reuse says how far its measurement is from this device and software; a
    source that does not judge it leaves None, which follows from the origin.
    """

    shape: ProblemT
    config: ConfigT
    origin: Origin
    time_us: float | None = None
    reuse: Reuse | None = None

    @property
    def worth(self) -> Reuse | None:
        """How far the measurement is from this device and software; None for a prediction. A borrowed one of unknown
        identity is taken for another device's."""
        if self.origin is Origin.PREDICTED:
            return None
        return self.reuse or (Reuse.EXACT if self.origin is Origin.MEASURED else Reuse.SAME_CAPABILITY)
