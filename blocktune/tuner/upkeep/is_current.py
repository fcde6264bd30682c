"""Whether a record is of a kernel as it is now, and why it is due for verification."""

from blocktune.db.records.records import Best, Environment, Trial
from blocktune.db.rivals import with_todays_rivals
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import Origin


def is_live(record: Best | Trial) -> bool:
    """Return whether it was made with the present source of a kernel that there still is."""
    kernel = KERNELS.get(record.config.kernel)
    return kernel is not None and kernel.source_hash == record.kernel_hash


def due_reason(best: Best, environment: Environment) -> str:
    """Return why a winner of this device ought to be verified here; empty when it was measured with what is here now
    and against the default that the kernels have now.

    Predictions are never due: a search replaces them. A winner is verified under its own regime, whichever that is.
    """
    if best.origin in (Origin.COMMUNITY, Origin.BORROWED):
        return "it came from elsewhere"
    if best.origin is not Origin.MEASURED:
        return ""
    if not is_live(best):
        return f"the source of {best.config.kernel} has changed"
    names = ("triton", "ptxas", "driver", "torch", "cuda", "protocol", "power_limit_w")
    changed = (
        f"{name} {old or 'unknown'} became {new or 'unknown'}"
        for name in names
        if (old := getattr(best.environment, name)) != (new := getattr(environment, name))
    )
    return ", ".join(changed) or speedup_reason(best)


def speedup_reason(best: Best) -> str:
    """Return why a measured winner's speed-up over today's default is not known; empty where it is."""
    today = with_todays_rivals(best)
    if best.origin is Origin.PREDICTED or today.default is None or today.speedup_over_default is not None:
        return ""
    return f"it was not timed against {today.default.label}, the default"
