"""A process that measures, apart from the one that writes: a kernel of a peer may end it, or never return."""

import os
import time
from collections.abc import Iterable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Self

from tools.bench.drawn_peers.cells import Cell

START_SECONDS = 120.0
TURN_SECONDS = 60.0
"""Until the next word of the process, compilation included."""


class MeasuringProcess:
    """Measures cells in a process, which is started again where it ends or hangs."""

    def __init__(self) -> None:
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()

    def row(self, cell: Cell, peers: Iterable[str], refused: Mapping[str, str]) -> dict[str, Any]:
        """Return what was measured of a cell; without whoever ended the process, which its row then says."""
        left_out = dict(refused)
        while True:
            self._connection.send((cell, tuple(peers), left_out))
            turn, answer = self._answer()
            if isinstance(answer, dict):
                return answer
            self._process.kill()
            self._start()
            if turn not in peers or turn in left_out:
                words = {**cell.to_json(), "label": cell.shape.label, "refused": left_out}
                return words | {"error": f"{turn}: {answer}"}
            left_out[turn] = answer

    def _start(self) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        if not self._connection.poll(START_SECONDS):
            raise TimeoutError(f"The process that measures has not started within {START_SECONDS:.0f} s.")
        self._connection.recv()

    def _answer(self) -> tuple[str, dict[str, Any] | str]:
        """Return whose turn it was last, and the row, or why there is none."""
        turn = "start"
        try:
            while self._connection.poll(TURN_SECONDS):
                said = self._connection.recv()
                if not isinstance(said, str):
                    return turn, said if isinstance(said, dict) else said[0]
                turn = said
        except EOFError:
            return turn, "the process ended"
        return turn, f"no answer within {TURN_SECONDS:.0f} s"


def _serve(connection: Connection) -> None:
    """Answer with a row for each cell. Names of whose turn it is come before; ("reason",) instead of a row says that
    the CUDA context has ended."""
    from blocktune.tuner.measure.clock import CudaClock
    from tools.bench.drawn_peers.measuring import ContextLostError, Measuring, only_ours
    from tools.differential.runs.served import ServedBy

    only_ours()
    measuring = Measuring(CudaClock(), connection.send, ServedBy())
    connection.send("ready")
    while True:
        try:
            connection.send(measuring.row(*connection.recv()))
        except ContextLostError as error:
            connection.send((str(error),))
            time.sleep(1)
            os._exit(1)  # nothing of CUDA can be taken down in order
