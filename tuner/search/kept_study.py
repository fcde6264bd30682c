"""What `tune` asks: a strategy whose study stays in memory, or is kept where `--study` says."""

from blocktune.tuner.search.loop import Subject
from blocktune.tuner.search.problem import Problem
from blocktune.tuner.search.proposals import Proposals
from blocktune.tuner.search.strategies import make_proposals


def kept_proposals(sampler: str, place: str | None, subject: Subject, problem: Problem) -> Proposals:
    """Returns what a search asks for the next config.

    Args:
        sampler: a strategy, as `make_proposals` takes it.
        place: URL or SQLite file of the storage that keeps the study; None is memory.
        subject: what is tuned; it names the study.
        problem: what is searched.

    Raises:
        UsageError: there is no such strategy.
        StoreError: the storage cannot be opened, or it holds something else.
    """
    if place is None:
        return make_proposals(problem, sampler)
    from blocktune.tuner.sampling.parameters import Parameters
    from blocktune.tuner.sampling.study_exchange import study_of
    from blocktune.tuner.sampling.study_storage import storage_url

    parameters = Parameters(problem.space)
    study = study_of(storage_url(place), subject.device, subject.environment, subject.shape, parameters)
    return make_proposals(problem, sampler, study)
