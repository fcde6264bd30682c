"""The seam between many searches and whoever makes them: processes of this host, or a cluster."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from blocktune.tuner.fleet.job import Event, Job


class Executor(Protocol):
    """Makes jobs on GPUs of one kind. All of its workers keep what they find in the job's database, trial by trial."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        """Make all jobs and tell how it goes; each ends by one `Finished` or one `Failed`.

        A job whose worker dies is taken over by another one. When the iterator is closed, or an exception leaves it,
        nothing runs any more.
        """

    def interrupt(self) -> None:
        """Begin no further job and end the running ones early: those that found something still are `Finished`. May
        be called from a signal handler while `run` goes on."""
