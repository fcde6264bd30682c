"""What the configs of a call compile to."""

from collections.abc import Sequence

from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import UserConfig
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.jitted.compile_ahead import CompileAhead
from blocktune.tuner.jitted.specialization import specialization_of


def compiles(
    call: Call, configs: Sequence[UserConfig], cc: tuple[int, int], compiler: CompileAhead
) -> dict[UserConfig, Compiled | None]:
    """Return how the compiles of configs ended; None where this process has the code already, or Triton cannot say what
    it would compile."""
    found = (specialization_of(call, config, cc) for config in configs)
    specialized = [each for each in found if each is not None]
    ended = compiler.compile(call.name, specialized, cc, call.settings.max_spill_bytes)
    return {config: ended.get(config) for config in configs}
