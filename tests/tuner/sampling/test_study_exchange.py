"""Stored trials as studies and back, and the pictures that Optuna makes of them."""

from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.importance import get_param_importances

from blocktune.db.exchange.importing import records_from
from blocktune.db.records.records import Outcome, Trial
from blocktune.kernels.values.errors import ImportRejectedError, StoreError
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.sampling.study_exchange import documents_of, write_studies
from tests.support.models import landscape
from tests.tuner.search.test_search import new_search

pytestmark = pytest.mark.triton_free


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    search = new_search(ReplayRunner(landscape.measurements(0)), trials=60)
    search.run()
    return [replace(trial, kernel_hash="0" * 16) for trial in search.trials.values()]


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'studies.db'}"


def test_trials_are_a_study_and_come_back_as_they_were(trials: list[Trial], tmp_path: Path) -> None:
    url = url_of(tmp_path)
    assert list(write_studies(trials, url).values()) == [60]
    assert list(write_studies(trials, url).values()) == [60]  # the second time they are there already
    (name,) = optuna.get_all_study_names(url)
    study = optuna.load_study(study_name=name, storage=url)
    assert "NVIDIA H200, b2 h32 s8192 d64 bf16" in name
    best = min((trial for trial in trials if trial.outcome is Outcome.OK), key=lambda t: t.relative_to_anchor or 9.9)
    assert study.best_params == {"kernel": best.config.kernel, **best.config.parameters}
    assert study.best_trial.user_attrs["time_us"] == best.time_us
    (document,) = documents_of(url)
    bests, taken = records_from(document)
    assert bests == []
    assert {trial.config: (trial.outcome, trial.time_us, trial.samples_us) for trial in taken} == {
        trial.config: (trial.outcome, trial.time_us, trial.samples_us) for trial in trials
    }


def test_optuna_says_which_parameters_matter(trials: list[Trial], tmp_path: Path) -> None:
    from optuna.importance import PedAnovaImportanceEvaluator

    url = url_of(tmp_path)
    (name,) = write_studies(trials, url)
    study = optuna.load_study(study_name=name, storage=url)
    found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    assert {"block_m", "block_n", "num_warps", "num_stages"} <= set(found)


def test_a_storage_without_such_studies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportRejectedError, match="No such storage of studies"):
        documents_of(url_of(tmp_path))
    optuna.create_study(storage=url_of(tmp_path))
    with pytest.raises(ImportRejectedError, match="has no study that"):
        documents_of(url_of(tmp_path))
    with pytest.raises(StoreError):
        documents_of("nonsense://here")


def test_what_was_changed_in_a_study_is_checked_like_any_document(trials: list[Trial], tmp_path: Path) -> None:
    url = url_of(tmp_path)
    (name,) = write_studies(trials[:3], url)
    study = optuna.load_study(study_name=name, storage=url)
    study.set_user_attr("environment", {**study.user_attrs["environment"], "triton": "9.9"})
    with pytest.raises(ImportRejectedError, match="digest"):
        records_from(documents_of(url)[0])
