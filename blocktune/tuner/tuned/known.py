"""What is known of a call without measuring: from a frozen file, from rank 0, or from the store."""

import hashlib

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.tuned.call import Call, Choice
from blocktune.kernels.tuned.config import CONFIGS, Problem, UserConfig
from blocktune.kernels.tuned.fallback import UserRung, candidates, stored_winners
from blocktune.kernels.tuned.frozen import frozen_winners
from blocktune.kernels.tuned.triton_config import triton_config


def listed_problem(call: Call) -> Problem:
    """Return the problem of a call with the list that its winner is chosen from: each list has winners of its own."""
    words = "\n".join(sorted(config.document for config in call.configs))
    if call.settings.expand:
        words += f"\nexpand {call.settings.expand}"
    digest = hashlib.sha256(words.encode()).hexdigest()[:12]
    return Problem.of(dict(call.problem.arguments) | {CONFIGS: digest})


def known_choice(call: Call, device: DeviceSpec, *, last: UserRung) -> Choice | None:
    """Return the choice that is known of a call, no further down than a rung."""
    problem = listed_problem(call)
    winners = frozen_winners(call.name, call.source_hash, device)
    for frozen in winners:
        if frozen.problem == problem:
            return choice_of(call, frozen.config, UserRung.FROZEN, device, frozen.time_us)
    stored = winners + stored_winners(call.name, call.source_hash, device)
    for rung, winner in candidates(stored, problem):
        if rung.place <= last.place:
            return choice_of(call, winner.config, rung, device, winner.time_us)
    return None


def default_choice(call: Call, device: DeviceSpec) -> Choice:
    """Return the choice of the list's first config, which nothing was measured of."""
    return choice_of(call, call.default, UserRung.DEFAULT, device, None)


def choice_of(call: Call, config: UserConfig, rung: UserRung, device: DeviceSpec, time_us: float | None) -> Choice:
    """Return the choice of a config. One of the list keeps its hook; another has that of the list's first config."""
    launched = call.configs.get(config)
    if launched is None:
        launched = triton_config(config)
        launched.pre_hook = call.configs[call.default].pre_hook
    return Choice(
        config=launched,
        options=launched.all_kwargs(),
        rung=rung,
        problem=call.problem,
        label=config.label,
        device=device,
        time_us=time_us,
    )
