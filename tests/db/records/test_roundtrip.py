"""Any record comes back from the database, and from a document, as it was."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktune.db.exchange.document import document_from
from blocktune.db.exchange.importing import records_from
from blocktune.db.records.records import Best, Environment, Objective, Outcome, Regime, Telemetry, Trial
from blocktune.db.recovery.salvage import salvage_rows
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import catalogue, device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import ELEMENT_BYTES, AttentionShape, Causal, Direction
from tests.support.stores.older_stores import make_older

counts = st.integers(0, 2**31 - 1)
sizes = st.integers(1, 2**31 - 1)
times = st.floats(1e-3, 1e9)
energies = st.floats(1e-6, 1e10)
ratios = st.floats(1e-6, 1e6)
seconds = st.floats(0, 1e7)
words = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=30)
prose = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" \n\t"), max_size=30)
digests = st.text("0123456789abcdef", min_size=16, max_size=16)
names = st.from_regex(r"\A[a-z][a-z0-9_]{0,20}\Z")
moments = st.datetimes(datetime(2020, 1, 1), datetime(2026, 11, 1), timezones=st.just(UTC))
devices = st.sampled_from(sorted({entry.name for entry in catalogue()})).map(device_named)
environments = st.builds(
    Environment,
    triton=words,
    ptxas=words,
    torch=words,
    cuda=words,
    driver=words,
    protocol=counts,
    power_limit_w=st.integers(0, 10**5),
    regime=st.sampled_from(Regime),
)
configs = st.builds(
    KernelConfig,
    names,
    *([st.sampled_from([16, 32, 64, 128, 256])] * 2),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 8),
    extra=st.dictionaries(names.map(lambda name: f"own_{name}"), st.integers(-(1 << 20), 1 << 20), max_size=3).map(
        lambda own: tuple(own.items())
    ),
)
resources = st.builds(
    KernelResources,
    **dict.fromkeys(
        ("registers", "shared_bytes", "static_shared_bytes", "stack_bytes", "spill_bytes", "num_warps", "barriers"),
        counts,
    ),
    tensor_cores=st.sampled_from(["wgmma", "mma", "tcgen05", "none"]),
    code_sha256=st.sampled_from(["", "0f" * 32]),
)
telemetries = st.builds(
    Telemetry,
    sm_clock_mhz=st.none() | st.integers(0, 10**5),
    memory_clock_mhz=st.none() | st.integers(0, 10**5),
    temperature_c=st.none() | st.integers(0, 1000),
    power_w=st.none() | st.floats(0, 1e5),
    throttle_reasons=st.none() | st.integers(0, 2**63 - 1),
    other_processes=st.none() | st.integers(0, 10**6),
)


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    heads = draw(st.integers(1, 1 << 15))
    return AttentionShape(
        **{name: draw(sizes) for name in ("batch", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")},
        num_heads=heads * draw(st.integers(1, 1 << 15)),
        num_heads_kv=heads,
        dtype=draw(st.sampled_from(sorted(ELEMENT_BYTES))),
        causal=draw(st.sampled_from(Causal)),
        direction=draw(st.sampled_from(Direction)),
        features=Features.parse(draw(st.sampled_from(("", "window=127:0 softcap", "tree cached page=64", "varlen")))),
    )


def provenance() -> dict[str, st.SearchStrategy[Any]]:
    return {
        "device": devices,
        "environment": environments,
        "shape": shapes(),
        "config": configs,
        "kernel_hash": digests,
        "created_at": moments,
    }


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    outcome = draw(st.sampled_from(Outcome))
    return Trial(
        **{name: draw(values) for name, values in provenance().items()},
        outcome=outcome,
        resources=draw(st.none() | resources),
        blocks_per_sm=draw(st.none() | st.integers(0, 32)),
        occupancy=draw(st.none() | st.floats(0, 1)),
        limiters=tuple(draw(st.lists(st.sampled_from(["warps", "blocks", "registers"]), unique=True))),
        predicted_us=draw(st.none() | times),
        time_us=draw(times) if outcome is Outcome.OK else None,
        relative_to_anchor=draw(st.none() | ratios),
        samples_us=tuple(draw(st.lists(times, max_size=5))),
        error=draw(prose),
        compile_seconds=draw(seconds),
        bench_seconds=draw(seconds),
        telemetry=draw(telemetries),
        energy_mj=draw(st.none() | energies),
    )


@st.composite
def winners(draw: st.DrawFn) -> Best:
    origin = draw(st.sampled_from(Origin))
    return Best(
        **{name: draw(values) for name, values in provenance().items()},
        origin=origin,
        time_us=draw(times if origin is Origin.MEASURED else st.none() | times),
        **{name: draw(st.none() | times) for name in ("predicted_us", "default_time_us", "paper_time_us")},
        **{name: draw(st.none() | ratios) for name in ("speedup_over_default", "speedup_low", "speedup_high")},
        **{name: draw(st.none() | configs) for name in ("default", "paper")},
        trials=draw(counts),
        **{name: draw(st.none() | energies) for name in ("energy_mj", "default_energy_mj", "paper_energy_mj")},
        objective=str(draw(st.sampled_from(Objective))),
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResultStore]:
    with ResultStore.open(tmp_path_factory.mktemp("roundtrip") / "blocktune.db") as opened:
        yield opened


FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@FEW
@given(trial=trials())
def test_any_trial_comes_back(store: ResultStore, trial: Trial) -> None:
    store.record(trial)
    found = store.trials(trial.device, trial.shape, environment=trial.environment, kernel_hash=trial.kernel_hash)
    assert trial in found


@FEW
@given(best=winners())
def test_any_best_comes_back(store: ResultStore, best: Best) -> None:
    if store.set_best(best):
        assert store.best(best.device, best.shape) == best


@FEW
@given(best=winners(), trial=trials())
def test_any_document_comes_back(best: Best, trial: Trial) -> None:
    trial = replace(trial, device=best.device)
    text = json.dumps(document_from(best.device, [best], [trial]), allow_nan=False)
    assert records_from(json.loads(text)) == ([best], [trial])


def test_what_came_later_is_in_documents_that_have_it_alone(best: Best, trial: Trial) -> None:
    """So versions of before read the documents of whoever measures no energy."""
    document = document_from(best.device, [best], [trial])
    later = {"energy_mj", "default_energy_mj", "paper_energy_mj", "objective"}
    assert not later & (document["bests"][0].keys() | document["trials"][0].keys())
    frugal = replace(best, energy_mj=40.5, objective=str(Objective.ENERGY))
    document = document_from(best.device, [frugal], [replace(trial, energy_mj=40.25)])
    assert document["bests"][0].keys() & later == {"energy_mj", "objective"}
    assert document["trials"][0]["energy_mj"] == 40.25
    assert records_from(json.loads(json.dumps(document)))[0] == [
        replace(frugal, device=replace(best.device, uuid=None))
    ]


def test_a_store_without_energies_is_upgraded_and_salvaged(path: Path, best: Best, trial: Trial) -> None:
    with ResultStore.open(path) as store:
        store.record(trial)
        store.set_best(best)
    make_older(path, "0005")
    with ResultStore.open(path) as store:
        assert (store.trials(), store.bests()) == ([trial], [best])
        store.record(replace(trial, config=replace(trial.config, num_stages=4), energy_mj=40.25))
    found = salvage_rows(path)
    assert sorted((each.energy_mj for each in found.trials), key=str) == [40.25, None]
    assert [each.objective for each in found.bests] == ["time"]
    assert found.lost_at_least == 0
