"""The strategy of `tune`: one whose study stays in memory, or is kept where `--study` says."""

from blocktune.db.records.records import ConfigT, ProblemT
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.search.proposals import Enumeration, Proposals
from blocktune.tuner.search.strategies import make_proposals
from blocktune.tuner.subject.subject import Subject

IN_ORDER = "enumeration"
"""The strategy that needs no study unless one is kept: it imports no Optuna."""


def kept_proposals(
    sampler: str, place: str | None, subject: Subject[ProblemT, ConfigT], assignment: Assignment[ConfigT]
) -> Proposals[ConfigT]:
    """Return what a search asks for the next config.

    Args:
        sampler: a strategy, as `make_proposals` takes it.
        place: URL or SQLite file of the storage that keeps the study; None is memory.
        subject: what is tuned; it names the study.
        assignment: what is searched, and in how many trials.

    Raises:
        UsageError: there is no such strategy.
        StoreError: the storage cannot be opened, or it holds something else.
    """
    if place is None and sampler == IN_ORDER:
        return Enumeration(dict.fromkeys((*assignment.feasible_first, *assignment.space.feasible)))
    if place is None:
        return make_proposals(assignment, sampler)
    from blocktune.tuner.sampling.parameters import Parameters
    from blocktune.tuner.sampling.study_exchange import study_of
    from blocktune.tuner.sampling.study_storage import storage_url

    parameters = Parameters(assignment.space)
    # a label alone would take up the study of another source, whose configs count as tried
    name = " ".join(filter(None, (subject.label, subject.kernel_hash)))
    study = study_of(storage_url(place), subject.device, subject.environment, name, parameters)
    return make_proposals(assignment, sampler, study)
