"""Whether a record is of a kernel as it is now, and whether its config still runs."""

from blocktune.db.records.records import Best, Trial
from blocktune.kernels.registry import KERNELS


def is_live(record: Best | Trial) -> bool:
    """Return whether it was made with the present source of a kernel that there still is."""
    kernel = KERNELS.get(record.config.kernel)
    return kernel is not None and kernel.source_hash == record.kernel_hash


def still_runs(best: Best) -> bool:
    """Return whether today's kernel takes the config for the shape, whatever source it was measured with."""
    kernel, shape, limits = KERNELS.get(best.config.kernel), best.shape, best.device.limits
    if kernel is None or kernel.unsupported(shape, limits) is not None:
        return False
    return not kernel.violations(best.config, shape, limits)
