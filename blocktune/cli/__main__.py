"""`python -m blocktune.cli`: the commands, where no console command is installed."""

from blocktune.cli.main import main

main()
