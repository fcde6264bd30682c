"""The child process that measures an autotuned kernel: `python -m blocktune.tuner.launches.measure_worker`.

It takes the commands of tuner/measure/worker.py, where the problem of `setup` is a `SavedCall` and configs are those of
an autotuned kernel, and one more:

    {"command": "rounds", "configs": [{…}, …], "count": 3}
        {"result": {"samples_us": [[…] or null, …], "failures": ["" or "why", …]}}
"""

from typing import Any

from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.launches.launch_bench import LaunchBench, LaunchTools
from blocktune.tuner.launches.saved_call import call_of
from blocktune.tuner.measure.bench import Bench, Tell
from blocktune.tuner.measure.worker import Commands, serve


class LaunchCommands(Commands[LaunchConfig]):
    """The commands of a process that measures calls."""

    def run(self, bench: Bench[LaunchConfig], command: dict[str, Any], tell: Tell) -> dict[str, Any]:
        if command["command"] != "rounds":
            return super().run(bench, command, tell)
        assert isinstance(bench, LaunchBench)
        configs = self.configs(command)
        timed = bench.rounds(configs, command["count"])
        return {
            "samples_us": [timed.get(config) for config in configs],
            "failures": [bench.failures.get(config, "") for config in configs],
        }


def main(tools: LaunchTools) -> None:
    """Answer commands until the input ends."""
    serve(LaunchCommands(lambda call, terms: LaunchBench(call, tools, terms), call_of, LaunchConfig.from_json))


if __name__ == "__main__":
    main(LaunchTools())
