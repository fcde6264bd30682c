"""Read a recorded sweep, in which every config of a shape was measured, into a table of the fastest ones.

python examples/read_sweep.py results/sweeps/h200-b2-h32-s8192-d64-bf16.sweep.json.gz
"""

import sys
from collections import Counter
from pathlib import Path

from blocktune.tuner.lab.sweep_file import load_sweep

SWEEP = Path(__file__).parents[1] / "results" / "sweeps" / "h200-b2-h32-s8192-d64-bf16.sweep.json.gz"
SHOWN = 10


def main(path: Path) -> None:
    sweep = load_sweep(path)
    outcomes = Counter(str(trial.outcome) for trial in sweep.trials)
    print(f"{sweep.label} on {sweep.device.name}: {', '.join(f'{n} {name}' for name, n in outcomes.most_common())}")
    fastest = sorted(sweep.timed.values(), key=lambda trial: trial.time_us)[:SHOWN]
    print(f"{'time, µs':>10} {'over best':>10} {'registers':>10} {'shared, B':>10}  config")
    for trial in fastest:
        resources, slowdown = trial.resources, trial.time_us / fastest[0].time_us
        used = f"{resources.registers:10} {resources.shared_bytes:10,}" if resources else f"{'-':>10} {'-':>10}"
        print(f"{trial.time_us:10,.1f} {slowdown:10.3f} {used}  {trial.config.label}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SWEEP)
