"""Known configs of a call: from a frozen file, from rank 0, or from the store."""

from collections.abc import Sequence
from dataclasses import replace

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import Origin
from blocktune.runtime.autotuned.boundary import tolerance
from blocktune.runtime.autotuned.call import FAR, AutotunedCall
from blocktune.runtime.autotuned.config import BYTES, PROGRAMS, LaunchConfig, LaunchProblem
from blocktune.runtime.autotuned.fallback import KernelExplanation, KernelWinner, kernel_offers, stored_winners
from blocktune.runtime.autotuned.frozen import frozen_winners
from blocktune.runtime.selection.explanation import Explanation, measured_reason
from blocktune.runtime.selection.ladder import Candidate, Rejection, Rung, climb

KernelCandidate = Candidate[LaunchProblem, LaunchConfig]


def known_choice(
    call: AutotunedCall, device: DeviceSpec, *, last: Rung, of_any_size: bool = False
) -> KernelExplanation | None:
    """Return the choice that is known of a call, no further down than a source.

    Args:
        call: the call.
        device: the GPU.
        last: the source.
        of_any_size: whether a winner counts as the call's own that was measured with a launch of a far size.
    """
    given = list[KernelWinner]()
    with tolerance(call.name, "frozen winners"):
        given = frozen_winners(call.name, call.source_hash, device)

    def stored() -> list[KernelWinner]:
        with tolerance(call.name, "stored winners"):
            return stored_winners(call.name, call.source_hash, device)
        return []

    offers = kernel_offers(
        _by_size(call, given, of_any_size), lambda: _by_size(call, stored(), of_any_size), call.listed_problem
    )
    passed_over: list[Rejection] = []

    def fit(candidate: KernelCandidate) -> KernelCandidate | str:
        return candidate if call.takes(candidate.config) else f"{candidate.config.label} is no config of this call"

    for step in climb(offers, last=last, refusal=f"nothing below `{last}` is accepted", fit=fit):
        if isinstance(step, Candidate):
            return choice_of(call, step, device, passed_over)
        passed_over.append(step)
    return None


def _by_size(call: AutotunedCall, winners: Sequence[KernelWinner], of_any_size: bool) -> list[KernelWinner]:
    """Return winners, where those of the call but for its size stand for it, the nearest size first."""
    wanted = call.listed_problem
    problem = wanted.without(PROGRAMS, BYTES)
    own, others = list[tuple[float, KernelWinner]](), list[KernelWinner]()
    for winner in winners:
        factor = call.size_factor(winner.shape)
        if winner.shape.without(PROGRAMS, BYTES) == problem and (of_any_size or factor <= FAR):
            own.append((factor, replace(winner, shape=wanted)))
        else:
            others.append(winner)
    return [*(winner for _, winner in sorted(own, key=lambda each: each[0])), *others]


def default_choice(call: AutotunedCall, device: DeviceSpec | None) -> KernelExplanation:
    """Return the choice of the list's first config, which nothing was measured of."""
    return choice_of(call, Candidate(rung=Rung.DEFAULT, config=call.default, origin=Origin.DEFAULT), device)


def choice_of(
    call: AutotunedCall,
    candidate: KernelCandidate,
    device: DeviceSpec | None,
    passed_over: Sequence[Rejection] = (),
) -> KernelExplanation:
    """Return the choice of a config."""
    return Explanation(
        rung=candidate.rung,
        reason=_reason(candidate),
        shape=call.problem,
        config=candidate.config,
        origin=candidate.origin,
        tuned_for=candidate.tuned_for,
        time_us=candidate.time_us,
        passed_over=tuple(passed_over),
        device=None if device is None else device.key,
        launched=call.launched(candidate.config),
    )


def _reason(candidate: KernelCandidate) -> str:
    if candidate.rung is Rung.DEFAULT:
        return "the first config of the list, not measured"
    reason = "frozen for this call" if candidate.rung is Rung.FROZEN else measured_reason(candidate, "call")
    return reason if candidate.time_us is None else f"{reason}, {candidate.time_us:.1f} us"
