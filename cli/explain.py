"""`tune explain`: where the time of a config goes by the models, what binds it, and what would lift that."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.best import look_up
from blocktune.cli.options import AsJson, Database, DeviceName, ShapeFlags, with_shape_flags
from blocktune.cli.render import microseconds, note, percent, print_json, print_table
from blocktune.cli.store import existing_store
from blocktune.cli.subject import BlockM, BlockN, OwnParameters, Stages, Subject, default_subject
from blocktune.kernels.errors import NoFeasibleConfigError
from blocktune.tuner.target import choose_device

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore
    from blocktune.kernels.device import DeviceSpec
    from blocktune.kernels.shape import AttentionShape
    from blocktune.tuner.analysis import Analysis
    from blocktune.tuner.on_chip import Tile
    from blocktune.tuner.roofline import Roofline

ALGORITHMS = {
    "standard": "standard attention",
    "v1": "FlashAttention v1, these blocks",
    "v2": "v2, these blocks, no cache",
    "v2_perfect_l2": "v2, every key in L2",
    "own": "this kernel, no cache",
    "own_perfect_l2": "this kernel, launches read once",
}
"""Names of `Analysis.traffic` for people."""


@with_shape_flags
def explain(
    flags: ShapeFlags,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Start from this kernel's default.")] = None,
    block_m: BlockM = None,
    block_n: BlockN = None,
    warps: Annotated[int | None, typer.Option("--warps", help="Warps of a block.")] = None,
    stages: Stages = None,
    param: OwnParameters = None,
    device: DeviceName = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Explain a config: where its time goes by the models, what binds it, what would lift that.

    The config is the one that `tune best` shows, or the default of --kernel; --block-m and the like change it.
    It is compiled here, which needs no GPU. A measured time, where the database has one, stands beside the prediction.

    \b
    tune explain --seq 8192 --dim 64
    tune explain --seq 8192 --dim 128 --causal --device h200 --kernel flash_fwd --block-m 128 --block-n 64
    tune explain --seq 8192 --dim 128 --direction backward
    tune explain --seq 1 --seq-k 8192 --batch 8 --heads 32 --kv-heads 8 --dim 128
    """
    shape, spec = flags.shape(), choose_device(device)
    choices = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
    with existing_store(db) as store:
        chosen = _choose(store, db, spec, shape, kernel, choices, param or [])
    resources = chosen.subject.compile()

    from blocktune.tuner.analysis import analyse
    from blocktune.tuner.analysis_text import explain as words

    subject = chosen.subject
    analysis = analyse(subject.kernel, subject.config, shape, spec, resources, measured_us=chosen.measured_us)
    if as_json:
        print_json(analysis.to_json() | {"source": chosen.source, "explanation": words(analysis)})
        return
    if flags.assumed():
        note(flags.assumed())
    typer.echo(f"{shape.label} on {spec.name}\n{subject.config.label}: {chosen.source}\n")
    _show(analysis)
    typer.echo(words(analysis))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The config to explain, why this one, and what it took on this device."""

    subject: Subject
    source: str
    measured_us: float | None


def _choose(
    store: "ResultStore | None",
    db: str | None,
    device: "DeviceSpec",
    shape: "AttentionShape",
    kernel: str | None,
    choices: dict[str, int | None],
    own: list[str],
) -> _Choice:
    """The config that the flags name, else the one that a call of this shape would get."""
    found = _default(kernel, device, shape) if kernel else _known(store, db, device, shape)
    subject = found.subject.with_choices(choices, own)
    changed = subject.config != found.subject.config
    measured_us = None if changed else found.measured_us
    if store is not None and measured_us is None:
        from blocktune.tuner.analysis import measured_time_us

        measured_us = measured_time_us(store, device, shape, subject.config, subject.kernel.source_hash)
    return _Choice(subject=subject, source="as given" if changed else found.source, measured_us=measured_us)


def _default(kernel: str, device: "DeviceSpec", shape: "AttentionShape") -> _Choice:
    return _Choice(
        subject=default_subject(kernel, shape, device.limits), source="the kernel's default", measured_us=None
    )


def _known(store: "ResultStore | None", db: str | None, device: "DeviceSpec", shape: "AttentionShape") -> _Choice:
    """What the dispatcher's ladder has for the shape."""
    from blocktune.kernels.explanation import Explanation
    from blocktune.kernels.ladder import Rung
    from blocktune.kernels.registry import get_kernel

    candidate = look_up(store, db, device, shape).candidate
    if candidate is None:
        raise NoFeasibleConfigError(
            f"An explanation needs a kernel that computes the shape, but none computes {shape.label} on {device.name}. "
            "PyTorch's scaled_dot_product_attention would."
        )
    return _Choice(
        subject=Subject(get_kernel(candidate.config.kernel), candidate.config, shape, device.limits),
        source=Explanation.of(candidate, shape).reason,
        measured_us=candidate.time_us if candidate.rung is Rung.EXACT else None,
    )


def _show(analysis: "Analysis") -> None:
    if analysis.breakdown is not None:
        print_table(("where the time goes", "", "of the whole"), _time_rows(analysis))
        typer.echo("")
    print_table(("device memory", "bytes", "FLOP/B", "time at least", "ceiling"), _memory_rows(analysis))
    typer.echo("")
    if analysis.passes:
        print_table(("launch", "reads, no cache", "writes", "reads, each once", "writes"), _pass_rows(analysis))
        typer.echo("")
    if analysis.budget is not None:
        columns = ("on the chip", "rows x columns", "bytes", "where")
        print_table(
            columns, ((tile.name, _size(tile), f"{tile.bytes:,}", tile.place) for tile in analysis.budget.tiles)
        )
        typer.echo("")


def _time_rows(analysis: "Analysis") -> list[tuple[str, str, str]]:
    """The terms of the cost model, the largest first, and the total."""
    from blocktune.tuner.analysis_terms import terms_of

    breakdown = analysis.breakdown
    assert breakdown is not None
    times = {words: getattr(breakdown, f"{name}_us") for name, words in terms_of(analysis.shape).items()}
    ordered = sorted(times.items(), key=lambda term: -term[1])
    total = breakdown.total_us
    rows = [(words, microseconds(time), percent(round(time / total, 3))) for words, time in ordered if time]
    return [*rows, ("in all, overlapping", microseconds(total), "")]


def _memory_rows(analysis: "Analysis") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, traffic in analysis.traffic.items():
        line = analysis.rooflines.get(name)
        rows.append((ALGORITHMS[name], f"{traffic.total_bytes:,}", *(("-",) * 3 if line is None else _ceiling(line))))
    return rows


def _pass_rows(analysis: "Analysis") -> list[tuple[str, ...]]:
    """The launches in order, with their bytes by both counts."""
    from blocktune.tuner.io_passes import Passes

    uncached = analysis.traffic[analysis.uncached]
    assert isinstance(uncached, Passes)
    return [
        (once.name, *(f"{bytes_:,}" for part in (whole, once) for bytes_ in (part.read_bytes, part.written_bytes)))
        for whole, once in zip(uncached.passes, analysis.passes, strict=True)
    ]


def _ceiling(line: "Roofline") -> tuple[str, str, str]:
    bound = "memory" if line.bound_by_memory else "arithmetic"
    return f"{line.intensity:,.1f}", microseconds(line.least_us), bound


def _size(tile: "Tile") -> str:
    copies = f"{tile.count} of " if tile.count > 1 else ""
    return f"{copies}{tile.rows} x {tile.columns}, {tile.element_bytes} B each"
