"""Documents of results: they travel whole, and look the same every time."""

import json
import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import document_from, load_document, save_document
from blocktune.db.exchange.importing import records_from, records_in
from blocktune.db.exchange.merging import ImportCounts
from blocktune.db.records.records import Best, Environment, KernelBest, KernelTrial, Outcome, Regime, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.files.reading import DOCUMENT_BYTES
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import ImportRejectedError, UsageError

Document = dict[str, Any]


def test_results_travel_whole(store: ResultStore, path: Path, trial: Trial, bests: list[Best]) -> None:
    failed = replace(trial, config=replace(trial.config, num_stages=4), outcome=Outcome.WRONG_RESULT, time_us=None)
    for record in (trial, failed):
        store.record(record)
    for best in bests:
        store.set_best(best)
    document = store.export_json(trials=True)
    with ResultStore.open(path) as other:
        assert other.import_json(document, trust=True) == ImportCounts(bests=5, bests_kept=0, trials=2, trials_kept=0)
        assert other.export_json(trials=True) == document
        # The uuid of a piece of hardware stays at home.
        anonymous = replace(trial.device, uuid=None)
        assert other.bests() == [replace(best, device=anonymous) for best in bests]
        assert other.trials() == [replace(record, device=anonymous) for record in (trial, failed)]
        for trust in (True, False):
            counts = other.import_json(document, trust=trust)
            assert counts == ImportCounts(bests=0, bests_kept=5, trials=0, trials_kept=2)


def test_results_of_autotuned_kernels_travel_whole(
    store: ResultStore, path: Path, kernel_trial: KernelTrial, kernel_best: KernelBest, best: Best, trial: Trial
) -> None:
    store.put_all([kernel_trial, trial], [kernel_best, best])
    document = json.loads(json.dumps(store.export_json(trials=True)))
    anonymous = replace(kernel_trial.device, uuid=None)
    with ResultStore.open(path) as other:
        other.import_json(document, trust=True)
        assert other.export_json(trials=True) == document
        assert other.kernel_bests() == [replace(kernel_best, device=anonymous)]
        assert other.all_trials() == [replace(each, device=anonymous) for each in (trial, kernel_trial)]


def test_a_stranger_s_winners_of_autotuned_kernels_are_left_out(
    store: ResultStore, kernel_trial: KernelTrial, kernel_best: KernelBest
) -> None:
    document = document_from(kernel_best.device, [kernel_best], [kernel_trial])
    store.import_json(document)
    assert store.kernel_bests() == []
    (found,) = store.all_trials()
    assert found.imported


@pytest.mark.parametrize("field", ["config", "default", "paper"])
def test_a_config_of_another_kernel_is_refused(kernel_best: KernelBest, field: str) -> None:
    document = document_from(kernel_best.device, [kernel_best], None)
    (row,) = document["bests"]
    row[field] = row["config"] | {"kernel": "package.module:other"}
    with pytest.raises(ImportRejectedError, match=rf"bests\[0\].{field}.* a config of {kernel_best.shape.kernel}"):
        records_in(document)


def test_what_a_stranger_measured_is_not_measured_here(store: ResultStore, document: Document, best: Best) -> None:
    store.import_json(document)
    (found,) = store.bests()
    assert found == replace(best, origin=Origin.BORROWED, device=replace(best.device, uuid=None))
    assert [trial.imported for trial in store.trials()] == [True, True]
    # A search asks what this software made here: nothing that was only imported.
    assert store.trials(best.device, best.shape, environment=best.environment) == []
    store.import_json(document, trust=True)
    assert store.bests()[0].origin is Origin.MEASURED
    assert len(store.trials(best.device, best.shape, environment=best.environment)) == 2


def test_no_import_replaces_what_was_measured_here(store: ResultStore, document: Document, trial: Trial) -> None:
    own = replace(trial, time_us=70.0, created_at=trial.created_at - timedelta(days=1))
    store.record(own)
    store.import_json(document)
    assert own in store.trials()
    store.record(replace(own, time_us=71.0))
    assert [each.time_us for each in store.trials(environment=trial.environment)] == [71.0]


def test_an_import_does_not_replace_what_is_better_or_younger(store: ResultStore, best: Best, trial: Trial) -> None:
    newer = replace(best, created_at=best.created_at + timedelta(minutes=1))
    store.set_best(newer)
    store.record(replace(trial, created_at=newer.created_at))
    predicted = replace(best, origin=Origin.PREDICTED, created_at=newer.created_at + timedelta(minutes=1))
    for offered in (best, predicted):
        assert store.import_json(document_from(best.device, [offered], [trial]), trust=True).bests_kept == 1
    assert store.bests() == [newer]
    assert store.trials()[0].created_at == newer.created_at


def test_equal_results_give_equal_text(tmp_path: Path, bests: list[Best], trial: Trial) -> None:
    texts = []
    for name, order in (("a", 1), ("b", -1)):
        with ResultStore.open(tmp_path / f"{name}.db") as store:
            for best in bests[::order]:
                store.set_best(best)
            store.record(trial)
            save_document(store.export_json(trials=True), tmp_path / f"{name}.json")
        texts.append((tmp_path / f"{name}.json").read_bytes())
    assert texts[0] == texts[1]


def test_winners_alone_are_small(store: ResultStore, bests: list[Best], trial: Trial) -> None:
    store.record(trial)
    for best in bests:
        store.set_best(best)
    document = store.export_json()
    assert "trials" not in document
    assert len(json.dumps(document)) < 1500 * len(bests)


def test_the_device_is_named_unless_there_is_one(store: ResultStore, best: Best) -> None:
    with pytest.raises(UsageError, match="has results of none"):
        store.export_json()
    store.set_best(best)
    store.set_best(replace(best, device=device_named("h100-sxm")))
    with pytest.raises(UsageError, match="NVIDIA H200"):
        store.export_json()
    assert store.export_json(best.device)["device"]["name"] == best.device.name


def test_a_regime_is_told_where_it_is_not_the_one_of_old(store: ResultStore, best: Best) -> None:
    rested = replace(best, environment=replace(best.environment, regime=Regime.BURST))
    assert rested.environment.digest != best.environment.digest
    old = Environment(
        triton="3.6.0", ptxas="12.8.93", torch="2.11.0", cuda="13.0", driver="580.159.04", power_limit_w=700
    )
    assert old.digest == "81435a2574019b65"  # as computed before there were regimes
    document = document_from(best.device, [best, rested], None)
    said = document["environments"]
    assert "regime" not in said[best.environment.digest]  # so that older versions read it
    assert said[rested.environment.digest]["regime"] == "burst"
    bests, _ = records_from(document)
    assert {each.environment for each in bests} == {best.environment, rested.environment}
    said[rested.environment.digest]["regime"] = "tepid"
    with pytest.raises(ImportRejectedError, match="must be one of burst, sustained"):
        store.import_json(document)


def test_a_file_comes_back_as_it_was_saved(tmp_path: Path, document: Document) -> None:
    file = tmp_path / "h200.json"
    save_document(document, file)
    save_document(document, file)
    assert load_document(file) == document
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"1" * 5000])
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ImportRejectedError, match="is not JSON"):
        load_document(file)


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    with file.open("wb") as opened:
        opened.truncate(DOCUMENT_BYTES + 1)
    with pytest.raises(ImportRejectedError, match="it is larger than 64 MiB"):
        load_document(file)


def test_a_file_that_cannot_be_written_keeps_the_old_one(tmp_path: Path, document: Document) -> None:
    file = tmp_path / "h200.json"
    save_document(document, file)
    with pytest.raises(ValueError, match="Out of range float"):
        save_document(document | {"bests": [math.nan]}, file)
    assert load_document(file) == document
    assert list(tmp_path.iterdir()) == [file]
