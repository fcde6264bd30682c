"""Runs one fuzzer under atheris: python -m tools.fuzz.guided NAME SCRIPT FOLDER... [libFuzzer's options]

Only our own code is instrumented: an input that reaches a new place in it is kept in the first folder. SCRIPT runs this
with the name: libFuzzer starts itself again to merge.
"""

import sys

import atheris

with atheris.instrument_imports(include=["blocktune"]):
    from tools.fuzz.parsers import PARSERS, judge


def main() -> None:
    name, *arguments = sys.argv[1:]
    parser = PARSERS[name]
    atheris.Setup(arguments, lambda data: judge(parser, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
