"""The target of one kind of attention."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tools.pages.targets.choices import Chosen
from tools.pages.targets.sources import RIVALS, BenchRows, Source, TableRows, every_row

OVER_BEST = "over the fastest rival"
DEVICES = ("h200", "h100")
"""As files of results/ begin; the first is the one that the targets are of."""

FEATURES = tuple(f"{part}-features.bench.json" for part in ("", "-soft", "-flex", "-flex-backward"))
"""Benches of features: those with FlexAttention, which takes long to compile, stand last."""
NEWEST_CUDNN = "-cudnn928.bench.json"
"""Benches with a newer cuDNN than PyTorch's own."""

POWER = "The card is at its power limit, and its clock moves within one call."

STEP = "[A step at head_dim 128](../kernels/lab_diary.md#a-step-at-head_dim-128)"
AHEAD = "[Scores ahead](../kernels/lab_diary.md#scores-ahead)"
BIASES = "[ALiBi, masks and dropout](../kernels/lab_diary.md#alibi-masks-and-dropout-in-the-forward)"
BACKWARD_BIASES = "[the same in the backward](../kernels/lab_diary.md#alibi-masks-and-dropout-in-the-backward)"
EIGHT_BITS = "[The forward in 8 bits](../kernels/lab_diary.md#the-forward-in-8-bits)"
BATCH_1 = "[Decoding at batch 1](../kernels/lab_diary.md#decoding-at-batch-1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The least ratios of one kind of attention.

    what: the kind. least: of every cell. mean: the geometric mean of the cells; None where there is none.
    ratio: what the ratios are. sources: where its cells are. limit: what keeps cells below the target, and
    where attempts are written down; empty where none is.
    """

    what: str
    least: float
    sources: tuple[Source, ...]
    mean: float | None = None
    ratio: str = OVER_BEST
    limit: str = ""

    @property
    def kind(self) -> str:
        """What it is, below the heading of its topic."""
        return self.what.partition(", ")[2]

    @property
    def label(self) -> str:
        """What every cell is to reach, and their mean."""
        mean = "" if self.mean is None else f", mean {self.mean:.2f}"
        return f"{self.least:.2f}{mean}{self.suffix}"

    @property
    def suffix(self) -> str:
        """What the ratio is, if it is not over the fastest rival."""
        return "" if self.ratio == OVER_BEST else f" {self.ratio}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Some targets that a section of the page has. title: its heading."""

    title: str
    targets: tuple[Target, ...]


def benches(suffix: str, chosen: Chosen, rivals: Collection[str] = RIVALS) -> tuple[Source, ...]:
    """Return the bench of each device with a suffix, next to some contenders."""
    return tuple(BenchRows(file=f"{device}{suffix}", shapes=chosen, rivals=rivals) for device in DEVICES)


def feature_benches(chosen: Chosen, rivals: Collection[str] = RIVALS) -> tuple[Source, ...]:
    """Return all benches of features of each device, next to some contenders."""
    return tuple(source for suffix in FEATURES for source in benches(suffix, chosen, rivals))


def tables(
    suffix: str,
    column: str,
    rival: str,
    rows: Callable[[Sequence[str]], bool] = every_row,
    label: Sequence[str] = (),
) -> tuple[Source, ...]:
    """Return the table of each device with a suffix, whose ratios to one contender stand in a column."""
    return tuple(
        TableRows(file=f"{device}{suffix}", column=column, rival=rival, rows=rows, label=label) for device in DEVICES
    )
