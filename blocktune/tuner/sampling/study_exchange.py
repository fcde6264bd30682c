"""Studies in Optuna's own storage: those of searches, of stored trials, and stored trials of studies.

The results store is the source of truth. Every trial of a study carries its whole record, as an export of results has
it, so that a study can be taken back: it is checked like any imported document.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
from optuna.distributions import distribution_to_json
from optuna.study import Study
from sqlalchemy.engine import make_url

from blocktune.db.exchange.document import FORMAT, FORMAT_VERSION, Document
from blocktune.db.records.records import AnyTrial, ConfigT, Environment, problem_label
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import ImportRejectedError
from blocktune.tuner.candidates.space import ConfigSpace
from blocktune.tuner.sampling.parameters import Parameters
from blocktune.tuner.sampling.study_proposals import StudyProposals
from blocktune.tuner.sampling.study_storage import open_study, require_own
from blocktune.tuner.sampling.trial_facts import RECORD, score_of


def study_of(
    url: str, device: DeviceSpec, environment: Environment, label: str, parameters: Parameters[ConfigT]
) -> Study:
    """Return the study of a search in a storage, which goes on where an earlier one of the same parameters ended.

    Args:
        url: of the storage.
        device: that is tuned for.
        environment: the software there.
        label: of the problem.
        parameters: of the configs that may be proposed.

    Raises:
        StoreError: the storage cannot be opened, or the database holds something else.
    """
    study = open_study(f"{device.name}, {label}, {_digest(environment, parameters)}", url)
    study.set_user_attr("device", replace(device, uuid=None).to_json())
    study.set_user_attr("environment", environment.to_json())
    study.set_user_attr("shape", label)
    return study


def write_studies(trials: Iterable[AnyTrial], url: str) -> dict[str, int]:
    """Write stored trials as studies, one for every shape and environment; trials that are there already stay.

    Returns:
        How many trials each study has, by its name.

    Raises:
        StoreError: the storage cannot be opened, or the database holds something else.
    """
    groups: dict[tuple[str, str, str], list[AnyTrial]] = {}
    for trial in trials:
        groups.setdefault((trial.device.key, trial.environment.digest, problem_label(trial.shape)), []).append(trial)
    return dict(_write_study(own, url) for own in groups.values())


def _write_study(trials: Sequence[AnyTrial], url: str) -> tuple[str, int]:
    parameters = Parameters(ConfigSpace(feasible=tuple(dict.fromkeys(trial.config for trial in trials))))
    first = trials[0]
    study = study_of(url, first.device, first.environment, problem_label(first.shape), parameters)
    proposals = StudyProposals(study, parameters)
    for trial in trials:
        proposals.recall(trial.config, score_of(trial), trial)
    return study.study_name, len(study.get_trials(deepcopy=False))


def documents_of(url: str) -> list[Document]:
    """Return the trials of all studies in a storage as documents of results, one for each study, not yet checked.

    Raises:
        ImportRejectedError: there is no storage, or no study of a search in it.
        StoreError: the storage cannot be opened.
    """
    path = make_url(url).database if url.startswith("sqlite") else None
    if path is not None and not Path(path).exists():
        raise ImportRejectedError(f"No such storage of studies: {path}. Name another file.")
    require_own(url)
    documents = list(_documents(url))
    if not documents:
        raise ImportRejectedError(
            f"{url} has no study that `tune run --study` or `tune export --format optuna` made. Name another storage."
        )
    return documents


def _documents(url: str) -> Iterator[Document]:
    for name in optuna.get_all_study_names(url):
        study = optuna.load_study(study_name=name, storage=url)
        about, records = study.user_attrs, [trial.user_attrs.get(RECORD) for trial in study.get_trials(deepcopy=False)]
        if "device" in about and "environment" in about and any(records):
            yield _document(about, [record for record in records if record is not None])


def _document(about: Mapping[str, object], records: Sequence[Mapping[str, object]]) -> Document:
    digests = {str(record.get("environment")) for record in records}
    return {
        "format": FORMAT,
        "schema": FORMAT_VERSION,
        "device": about["device"],
        "environments": dict.fromkeys(digests, about["environment"]),
        "bests": [],
        "trials": list(records),
    }


def _digest(environment: Environment, parameters: Parameters[ConfigT]) -> str:
    """Return what keeps apart studies of one shape: other software, and other choices, which Optuna lets no study
    change."""
    choices = {name: distribution_to_json(found) for name, found in parameters.distributions.items()}
    return hashlib.sha256(json.dumps([environment.digest, choices], sort_keys=True).encode()).hexdigest()[:8]
