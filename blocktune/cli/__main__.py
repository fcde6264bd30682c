"""The console commands `blocktune` and `tune`, and `python -m blocktune.cli` where none is installed."""

import sys
from importlib.util import find_spec

from blocktune.cli.shared.tune_command import command_meant, run_command
from blocktune.kernels.values.errors import MissingPackageError

NEEDED = ("alembic", "numpy", "optuna", "rich", "sqlalchemy", "typer")
"""Packages of `blocktune[tune]`. Commands import them late; the start checks for all."""


def main() -> None:
    """Run the command line; without its packages, name them and leave."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        sys.stderr.write(f'error: The command line needs {names}. Install it: pip install "blocktune[tune]"\n')
        sys.exit(MissingPackageError.exit_code)
    from blocktune.cli.main import main as run

    run()


def tune() -> None:
    """Run the command line, or the command `tune` of another package where the words are for that."""
    other = command_meant(sys.argv[1:])
    if other is None:
        main()
    else:
        run_command(other)


if __name__ == "__main__":
    main()
