"""Tables of split counts for notes/kernels/decoding.md: what the decision takes, and what another count costs."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.correction import SUFFIX as CORRECTION
from blocktune.runtime.selection.expectation import Expectation
from blocktune.runtime.selection.untuned import shipped_untuned
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.lab.untuned import family_of
from tools import RECORDS
from tools.pages.document_tables import markdown_table
from tools.pages.recorded.sweeps import sweeps_in

HEADS = ((32, 8), (64, 8), (28, 4), (32, 32))
KEYS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 4, 16, 64)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
SWEEP_FOLDERS = ("sweeps", "dense-sweeps")

CHOSEN = (
    "Splits that an untuned call of one query takes, by heads (query and key), keys and batch, for head dimension 128 "
    "in bfloat16. After the count, how much longer half and twice of it are expected to take, where these were "
    "compared; what is expected to be faster by less than half of its spread is not taken:"
)
MEASURED = (
    "What another count costs where it was measured: the time of the best recorded config with that many splits over "
    "the best of all, {device}. `-` where nothing with that count was recorded:"
)


def block(path: Path) -> str:
    """Return both tables, of the device of a correction and of the recorded sweeps.

    Raises:
        UsageError: no correction ships for the device.
    """
    device = device_named(path.name.removesuffix(CORRECTION))
    sweeps = sweeps_in(*(RECORDS / name for name in SWEEP_FOLDERS))
    decoding = [sweep for sweep in sweeps if sweep.device.key == device.key and family_of(sweep.shape) == "decoding"]
    columns = ("heads", "keys", *(f"batch {batch}" for batch in BATCHES))
    measured = markdown_table(("shape", "best, µs", *map(str, COUNTS)), _measured_rows(decoding))
    chosen = markdown_table(columns, _chosen_rows(device))
    return "\n\n".join((CHOSEN, chosen, MEASURED.format(device=device.name), measured))


def _chosen_rows(device: DeviceSpec) -> Iterator[list[str]]:
    """Yield a row for every number of heads and keys."""
    untuned = shipped_untuned(device)
    if untuned is None:
        raise UsageError(
            f"No correction ships for {device.name}, so there is no table of its splits. See `tune lab calibrate`."
        )
    for heads, heads_kv in HEADS:
        for keys in KEYS:
            shapes = (
                AttentionShape(
                    batch=batch, num_heads=heads, num_heads_kv=heads_kv, seqlen_q=1, seqlen_k=keys,
                    head_dim=128, head_dim_v=128,
                )
                for batch in BATCHES
            )  # fmt: skip
            yield [f"{heads}:{heads_kv}", str(keys), *(_cell(untuned.choices(shape)) for shape in shapes)]


def _cell(choices: Sequence[Expectation]) -> str:
    """Return the splits of the first choice, with what half and twice as many are expected to cost in its kernel."""
    first = choices[0]
    splits = first.config.parameters.get("splits", 1)
    rivals = []
    for count in (splits // 2, 2 * splits):
        alike = [
            one.time_us
            for one in choices
            if one.config.kernel == first.config.kernel and one.config.parameters.get("splits", 1) == count
        ]
        if count and alike:
            rivals.append(f"{count}: {100 * (min(alike) / first.time_us - 1):+.0f} %")
    return f"**{splits}**" + (f" ({', '.join(rivals)})" if rivals else "")


def _measured_rows(sweeps: Iterable[Sweep]) -> Iterator[list[str]]:
    """Yield a row for every recorded shape: the best time of every number of splits over the best of all."""
    for sweep in sorted(sweeps, key=lambda sweep: sweep.shape.label):
        scores = sweep.scores
        best = min(scores, key=lambda config: scores[config])
        cells = []
        for count in COUNTS:
            alike = [score for config, score in scores.items() if config.parameters.get("splits") == count]
            cells.append(f"{min(alike) / scores[best]:.2f}" if alike else "-")
        yield [sweep.shape.label, f"{sweep.timed[best].time_us:.1f}", *cells]
