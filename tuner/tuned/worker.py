"""The child process that runs candidates of a tuned function: `python -m blocktune.tuner.tuned.worker`.

It speaks the protocol of `tuner/measure/worker.py`. The object under `shape` names the function, the hash of its
source, and the arguments as `save_arguments` describes them; configs are those of `UserConfig`.
"""

from collections.abc import Callable
from functools import partial, reduce
from importlib import import_module
from typing import Any

from blocktune.kernels.tuned.config import UserConfig
from blocktune.kernels.tuned.function import TunedFunction
from blocktune.tuner.measure.bench import Bench
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.protocol import Clock, CudaClock
from blocktune.tuner.measure.worker import serve
from blocktune.tuner.tuned.arguments import load_arguments
from blocktune.tuner.tuned.check import CallQuestion


def serve_calls(make_clock: Callable[[], Clock]) -> None:
    """Answers commands until the input ends."""
    serve(partial(_bench, make_clock), parse_shape=dict, parse_config=UserConfig.from_json)


def _bench(make_clock: Callable[[], Clock], subject: dict[str, Any], terms: Terms) -> Bench:
    function = find_function(subject["function"], subject["source_hash"])
    question = CallQuestion(load_arguments(subject), function.reference, function.tolerance)

    def bind(config: UserConfig) -> Callable[..., Any]:
        return partial(function.run, config)

    return Bench(question, question, clock=make_clock(), bind=bind, terms=terms)


def find_function(name: str, source_hash: str) -> TunedFunction:
    """The tuned function with this name, `module:qualified.name`.

    Raises:
        RuntimeError: there is another function under this name, or one with another source.
    """
    module, _, path = name.partition(":")
    found = reduce(getattr, path.split("."), import_module(module))
    if not isinstance(found, TunedFunction) or found.source_hash != source_hash:
        raise RuntimeError(f"{name} is not the function that is being tuned; is it importable, and saved as it runs?")
    return found


if __name__ == "__main__":
    serve_calls(CudaClock)
