"""`python -m blocktune`: the command line, where the console commands are not on the path."""

from blocktune.cli.__main__ import main

if __name__ == "__main__":
    main()
