"""`tune explain`: where the time of a config goes by the models, what binds it, and what would lift that."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from blocktune.cli.offline.calls import (
    Call,
    CallOutput,
    FailOn,
    FillCache,
    JunitFile,
    explain_call,
    refuse_beside_call,
    require_call,
)
from blocktune.cli.offline.kernel import explain_kernel
from blocktune.cli.output.render import microseconds, note, print_json, print_table, say
from blocktune.cli.shared.chosen_config import Choice, analyse_choice, choose_config, measured_time_us
from blocktune.cli.shared.compiled_config import BlockM, BlockN, DefaultOf, OwnParameters, Stages, Warps
from blocktune.cli.shared.kernels import KernelName
from blocktune.cli.shared.options import (
    AsJson,
    Database,
    DeviceName,
    ShapeFlags,
    Signature,
    kernel_instead,
    require_flags,
    with_optional_shape_flags,
)
from blocktune.cli.shared.stores import existing_store
from blocktune.db.records.records import problem_json
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore
    from blocktune.kernels.base.on_chip import ChipTile
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.config import KernelConfig
    from blocktune.tuner.cost.analysis import Analysis
    from blocktune.tuner.cost.roofline import Roofline

ALGORITHMS = {
    "standard": "standard attention",
    "v1": "FlashAttention v1, these blocks",
    "v2": "v2, these blocks, no cache",
    "v2_perfect_l2": "v2, every key in L2",
    "own": "this kernel, no cache",
    "own_perfect_l2": "this kernel, launches read once",
}
"""Names of `Analysis.traffic` for people."""


@with_optional_shape_flags
def explain(
    context: typer.Context,
    flags: ShapeFlags | None,
    autotuned: KernelName = None,
    signature: Signature = None,
    kernel: DefaultOf = None,
    block_m: BlockM = None,
    block_n: BlockN = None,
    warps: Warps = None,
    stages: Stages = None,
    param: OwnParameters = None,
    call: Call = None,
    fail_on: FailOn = None,
    junit: JunitFile = None,
    fill_cache: FillCache = None,
    device: DeviceName = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Explain a config: where its time goes, and what limits it.

    It says what would lift the limit. For an autotuned kernel, it compiles the winner of each key and shows how many of
    its blocks fit, what limits them, and what the other configs took. --param gives constants of a call that are not
    key values.

    With --call, every config of the kernels that a function launches is compiled for each --device, without a GPU.

    The config is the one that `tune best` shows, or the default of --kernel; --block-m and the like change it. It is
    compiled here, which needs no GPU. A measured time and the FlashAttention paper's heuristic stand next to the
    prediction. If measured and predicted time differ by more than a quarter, the command names no limit and gives no
    advice. A prediction has an error band, where 90 % of measured times were; without a measurement, a band of more
    than a quarter or an unchecked device gives no advice.

    \b
    tune explain --seq 8192 --dim 64
    tune explain --seq 8192 --dim 128 --causal --device h200 --kernel flash_fwd --block-m 128 --block-n 64
    tune explain my_kernels:softmax
    tune explain --call my_bench:step --device h200,a100 --fail-on spills
    """
    output = CallOutput(as_json=as_json, fail_on=fail_on, junit=junit, cache=fill_cache)
    require_call(call, output)
    if call is not None:
        refuse_beside_call(context)
        explain_call(call, device, output)
        return
    if autotuned is not None:
        name, options = kernel_instead(flags, autotuned), {"num_warps": warps, "num_stages": stages}
        explain_kernel(name, choose_device(device), db, signature, options, param or [], as_json=as_json)
        return
    flags = require_flags(flags)
    shape, spec = flags.shape(), choose_device(device)
    choices = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
    with existing_store(db) as store:
        chosen = choose_config(store, db, spec, shape, kernel, choices, param or [])
        paper = _paper_rule(store, spec, chosen)

    from blocktune.tuner.cost.text import text_of_analysis

    analysis = analyse_choice(chosen, spec)
    rival = None if paper is None else _Rival.of(paper, spec)
    if as_json:
        more = {
            "source": chosen.source,
            "paper": rival and rival.to_json(analysis),
            "explanation": text_of_analysis(analysis),
        }
        print_json(analysis.to_json() | {"shape": problem_json(shape)} | more)
        return
    if flags.assumed():
        note(flags.assumed())
    say(f"{shape.label} on {spec.name}\n{chosen.request.config.label}: {chosen.source}\n")
    _show(analysis)
    say(text_of_analysis(analysis))
    if rival is not None:
        say(rival.words(analysis))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rival:
    """The FlashAttention paper's heuristic config with its times; problem: why it has none."""

    config: "KernelConfig"
    predicted_us: float | None = None
    measured_us: float | None = None
    problem: str = ""

    @classmethod
    def of(cls, choice: Choice, device: "DeviceSpec") -> "_Rival":
        """Compile it."""
        try:
            breakdown = analyse_choice(choice, device).breakdown
        except NoFeasibleConfigError as error:
            return cls(config=choice.request.config, problem=str(error))
        predicted_us = None if breakdown is None else breakdown.total_us
        return cls(config=choice.request.config, predicted_us=predicted_us, measured_us=choice.measured_us)

    def to_json(self, analysis: "Analysis") -> dict[str, Any]:
        from blocktune.kernels.base.paper_rule import paper_blocks
        from blocktune.tuner.cost.bands import predicted_json

        rows, keys = paper_blocks(analysis.shape, analysis.device.limits)
        return {
            "config": self.config.to_json(),
            "formula": {"br": rows, "bc": keys},
            **predicted_json(self.predicted_us, self.config.kernel, analysis.shape, analysis.device),
            "measured_us": self.measured_us,
            "problem": self.problem,
        }

    def words(self, analysis: "Analysis") -> str:
        from blocktune.tuner.cost.bands import predicted_text

        facts = [self.problem] if self.problem else []
        if self.predicted_us is not None and analysis.breakdown is not None and analysis.is_explained:
            time = predicted_text(self.predicted_us, self.config.kernel, analysis.shape, analysis.device)
            ratio = self.predicted_us / analysis.breakdown.total_us
            facts.append(f"predicted {time}" + (f", {ratio:.2f} times this one's" if analysis.gives_advice else ""))
        if self.measured_us is not None:
            facts.append(f"measured {microseconds(self.measured_us)}")
        known, rounding = "; ".join(facts) or "no time is known", _rounding(self.config, analysis)
        return f"The FlashAttention paper's heuristic gives {self.config.label}: {known}. {rounding}"


def _rounding(config: "KernelConfig", analysis: "Analysis") -> str:
    """Return how the blocks of the paper's formula became those of a config."""
    from blocktune.kernels.base.paper_rule import paper_blocks

    rows, keys = paper_blocks(analysis.shape, analysis.device.limits)
    tiles = -(-keys // config.block_n)
    walked = "" if tiles == 1 else f", so that {tiles} tiles take the place of one"
    return (
        f"Its formula gives Br = {rows} and Bc = {keys}; the kernel has block_m = {config.block_m} and block_n = "
        f"{config.block_n}{walked}."
    )


def _paper_rule(store: "ResultStore | None", device: "DeviceSpec", chosen: Choice) -> Choice | None:
    """Return the paper's heuristic as the explained kernel can express it; None where it has no config, or gives this
    one."""
    from blocktune.kernels.base.paper_rule import paper_config

    request, winner = chosen.request, chosen.winner
    config = paper_config(request.kernel, request.shape, request.limits)
    if config is None or config == request.config:
        return None
    paper = replace(request, config=config)
    measured_us = winner.paper_time_us if winner is not None and winner.paper == config else None
    if measured_us is None:
        measured_us = measured_time_us(store, device, paper)
    return Choice(request=paper, source="FlashAttention's heuristic", measured_us=measured_us)


def _show(analysis: "Analysis") -> None:
    if analysis.is_explained:
        print_table(("where the time goes, by the models", "alone"), _time_rows(analysis))
        say("")
    print_table(("device memory", "bytes", "FLOP/B", "time at least", "ceiling"), _memory_rows(analysis))
    say("")
    if analysis.passes:
        print_table(("launch", "reads, no cache", "writes", "reads, each once", "writes"), _pass_rows(analysis))
        say("")
    if analysis.on_chip is not None:
        columns = ("on the chip", "rows x columns", "bytes", "where")
        print_table(
            columns, ((tile.name, _size(tile), f"{tile.bytes:,}", tile.place) for tile in analysis.on_chip.tiles)
        )
        say("")


def _time_rows(analysis: "Analysis") -> list[tuple[str, str]]:
    """Return what every term of the cost model takes alone, the largest first, and all of them together, which overlap:
    shares of the whole would add up to more than it."""
    from blocktune.tuner.cost.term_texts import terms_of

    breakdown = analysis.breakdown
    assert breakdown is not None
    times = {words: getattr(breakdown, f"{name}_us") for name, words in terms_of(analysis.shape).items()}
    ordered = sorted(times.items(), key=lambda term: -term[1])
    rows = [(words, microseconds(time)) for words, time in ordered if time]
    return [*rows, ("together, overlapping", analysis.predicted_text)]


def _memory_rows(analysis: "Analysis") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, traffic in analysis.traffic.items():
        line = analysis.rooflines.get(name)
        rows.append((ALGORITHMS[name], f"{traffic.total_bytes:,}", *(("-",) * 3 if line is None else _ceiling(line))))
    return rows


def _pass_rows(analysis: "Analysis") -> list[tuple[str, ...]]:
    """Return the launches in order, with their bytes by both counts."""
    from blocktune.tuner.traffic.launches import Passes

    uncached = analysis.traffic[analysis.uncached]
    assert isinstance(uncached, Passes)
    return [
        (once.name, *(f"{bytes_:,}" for part in (whole, once) for bytes_ in (part.read_bytes, part.written_bytes)))
        for whole, once in zip(uncached.passes, analysis.passes, strict=True)
    ]


def _ceiling(line: "Roofline") -> tuple[str, str, str]:
    bound = "memory" if line.bound_by_memory else "arithmetic"
    return f"{line.intensity:,.1f}", microseconds(line.least_us), bound


def _size(tile: "ChipTile") -> str:
    copies = f"{tile.count} of " if tile.count > 1 else ""
    return f"{copies}{tile.rows} x {tile.columns}, {tile.element_bytes} B each"
