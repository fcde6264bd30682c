"""The choice of a call that its process does not know: what is known elsewhere, else what is measured now."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.hardware.driver import read_driver
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.runtime.autotuned.boundary import warn_of_failure
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.settings import Measuring, measuring
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.drop_in.known import default_choice, known_choice
from blocktune.tuner.drop_in.node_lock import node_lock
from blocktune.tuner.measure.lock_file import Patience

logger = logging.getLogger("blocktune")


@contextmanager
def needing_a_gpu(kernel: str) -> Iterator[None]:
    """Let an error that there is none say what can be done without one for a kernel of the user's, of which no command
    about shapes knows.

    Raises:
        NoDeviceError: there is no GPU.
    """
    try:
        yield
    except NoDeviceError as error:
        report = read_driver()
        if report.devices:
            raise  # there are others
        raise NoDeviceError(
            f"{kernel} is launched on a GPU. {report.problem} Use a machine with one; without it `tune occupancy "
            f"{kernel}` says what a config compiles to, and TRITON_INTERPRET=1 computes what the kernel does."
        ) from error


def decide(call: AutotunedCall) -> KernelExplanation:
    """Return the choice of a call: known, or measured now.

    Raises:
        NoDeviceError: there is no GPU.
        UsageError: nothing is known and the settings are strict, or an argument cannot be restored.
        NoFeasibleConfigError: no config compiles and runs.
    """
    device = device_of(call)
    if device is None:
        return _choice_without_facts(call)
    choice = settled_choice(call, device) or _tuned_once(call, device)
    logger.info("%s: %s", call.name, choice)
    return choice


def _choice_without_facts(call: AutotunedCall) -> KernelExplanation:
    """Return the choice on a GPU of which so little is known that no result can be kept: each process measures by
    Triton's own tuner, as long as it may.

    Raises:
        UsageError: the settings are strict.
    """
    if call.settings.strict:
        raise _untuned(call, "a GPU of unknown kind")
    if measuring() is Measuring.OFF:
        return _unmeasured_choice(call, None)
    from blocktune.tuner.drop_in.tune_call import choice_by_triton

    return choice_by_triton(call)


def settled_choice(call: AutotunedCall, device: DeviceSpec) -> KernelExplanation | None:
    """Return the choice of a call that needs no measurement; None if there is none.

    Raises:
        UsageError: there is none, and the settings are strict.
    """
    choice = known_choice(call, device, last=call.settings.accept) or _unraced_choice(call, device)
    if choice is None and call.settings.strict:
        raise _untuned(call, device.name)
    return choice if measuring() is Measuring.ON else choice or _unmeasured_choice(call, device)


def _unmeasured_choice(call: AutotunedCall, device: DeviceSpec | None) -> KernelExplanation:
    """Return the best known choice of a call that this process may not measure."""
    known = None if device is None else known_choice(call, device, last=Rung.NEAREST)
    choice = known or default_choice(call, device)
    logger.log(
        logging.WARNING if measuring() is Measuring.OFF else logging.INFO,
        "%s: nothing was measured for %s, and %s. It gets %s: %s.",
        call.name,
        call.problem.label,
        measuring(),
        choice.label,
        choice.reason,
    )
    return choice


def _unraced_choice(call: AutotunedCall, device: DeviceSpec) -> KernelExplanation | None:
    """Return the choice of a call that is not raced, although nothing of its size is known: one that may not be gets
    what was measured with another size, and the times of an empty launch say nothing. None if the call is to be
    raced."""
    far = known_choice(call, device, last=call.settings.accept, of_any_size=True)
    is_final = call.settings.strict or measuring() is not Measuring.ON
    if call.size is not None and call.size.is_trivial:
        return far or known_choice(call, device, last=Rung.NEAREST) or default_choice(call, device)
    if far is not None:
        then = "is used" if is_final else "is not used, and all configs are raced once"
        logger.warning(
            "%s: a config that was measured with a launch of another size %s for %s, with %d programs on %d bytes.",
            call.name,
            then,
            call.problem.label,
            *call.size.entries.values() if call.size is not None else (0, 0),
        )
    return far if is_final else None


def device_of(call: AutotunedCall) -> DeviceSpec | None:
    """Return the current GPU; None, with a warning, where it is of no known kind.

    Raises:
        NoDeviceError: there is none.
    """
    with needing_a_gpu(call.name):
        try:
            return current_device()
        except NoDeviceError:
            raise
        except Exception as error:  # such as a GPU that is newer than the tables
            warn_of_failure(call.name, "the facts of its GPU", error)
            return None


def _tuned_once(call: AutotunedCall, device: DeviceSpec) -> KernelExplanation:
    """Return the choice that this process or, meanwhile, another one of the machine measures."""
    from blocktune.tuner.drop_in.tune_call import tuned_choice  # with it comes what compiles and measures

    patience = Patience(call.settings.wait_seconds)
    name = "\n".join((device.key, call.name, call.source_hash, call.listed_problem.document))
    with node_lock(name, call.name, patience) as is_first:
        choice = known_choice(call, device, last=call.settings.accept)
        if choice is None and is_first:
            choice = tuned_choice(call, device, patience)
    return choice or _waited_in_vain(call, device)


def _waited_in_vain(call: AutotunedCall, device: DeviceSpec) -> KernelExplanation:
    logger.warning(
        "Another process has been tuning %s for %g s: this one stops waiting, and uses the best config it knows.",
        call.name,
        call.settings.wait_seconds,
    )
    return known_choice(call, device, last=Rung.NEAREST) or default_choice(call, device)


def _untuned(call: AutotunedCall, device: str) -> UsageError:
    return UsageError(
        f"{call.name} is strict, but none of its {len(call.configs)} configs was measured for {call.problem.label} "
        f"on {device} (source {call.source_hash}, accepted down to {call.settings.accept}). Tune it where that "
        "is allowed and bring the store or a frozen file along, or leave out `strict` and BLOCKTUNE_STRICT."
    )
