"""The rivals of a winner: the default and FlashAttention's heuristic, as the kernels have them today."""

from dataclasses import replace

from blocktune.db.records.records import AnyBest, Best
from blocktune.kernels.values.shape import AttentionShape


def with_todays_rivals(best: AnyBest) -> AnyBest:
    """Return a winner that is compared with today's default and today's block rule of the paper; one of an autotuned
    kernel as it is, since the kernel's list alone knows its default.

    A stored winner names what it was timed against, and later kernels may have another default. The figure of a default
    that no call gets any more says nothing, so it is dropped: the speed-up is 1 where the winner is today's default
    itself and unknown elsewhere, until `tune verify` measures both. The same holds for FlashAttention's heuristic.
    """
    return _with_todays_paper(with_todays_default(best)) if isinstance(best.shape, AttentionShape) else best


def with_todays_default(best: Best) -> Best:
    """Return the winner as `with_todays_rivals` does, for those who do not show FlashAttention's heuristic."""
    from blocktune.kernels.registry import default_kernel  # imports triton

    kernel = None if best.default is None else default_kernel(best.shape, best.device.limits)
    if kernel is None:
        return best
    today = kernel.default_config(best.shape, best.device.limits)
    is_today = today == best.config and best.time_us is not None
    if best.default == today and not is_today:
        return best
    ratio, time_us, energy_mj = (1.0, best.time_us, best.energy_mj) if is_today else (None, None, None)
    return replace(
        best,
        default=today,
        default_time_us=time_us,
        default_energy_mj=energy_mj,
        speedup_over_default=ratio,
        speedup_low=ratio,
        speedup_high=ratio,
    )


def _with_todays_paper(best: Best) -> Best:
    from blocktune.kernels.base.paper_rule import first_paper_config
    from blocktune.kernels.registry import kernels_for

    limits = best.device.limits
    able = () if best.paper is None else kernels_for(best.shape, limits)
    if best.paper is None or not able:
        return best
    of_its_kernel = [kernel for kernel in able if kernel.name == best.paper.kernel]
    if best.paper == first_paper_config(of_its_kernel, best.shape, limits):
        return best
    today = first_paper_config(able, best.shape, limits)
    time_us, energy_mj = (best.time_us, best.energy_mj) if today == best.config else (None, None)
    return replace(best, paper=today, paper_time_us=time_us, paper_energy_mj=energy_mj)
