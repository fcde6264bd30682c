"""What a config source recommends for a shape."""

from dataclasses import dataclass

from blocktune.kernels.stored.provenance import Reuse
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedConfig:
    """The config that a source recommends for one shape on one device.

    time_us is None unless it was measured. reuse says how far its measurement is from this device and software; a
    source that does not judge it leaves None, which follows from the origin.
    """

    shape: AttentionShape
    config: KernelConfig
    origin: Origin
    time_us: float | None = None
    reuse: Reuse | None = None
