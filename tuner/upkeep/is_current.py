"""Whether a record is of a kernel as it is now."""

from blocktune.db.records.records import Best, Trial
from blocktune.kernels.registry import KERNELS


def is_live(record: Best | Trial) -> bool:
    """Return whether it was made with the present source of a kernel that there still is."""
    kernel = KERNELS.get(record.config.kernel)
    return kernel is not None and kernel.source_hash == record.kernel_hash
