"""The bars of forwards."""

from collections.abc import Collection

from blocktune.cli.pages.bars.bar import BIASES, EIGHT_BITS, POWER, Bar, benches
from blocktune.cli.pages.bars.choices import forwards, is_forward, words
from blocktune.cli.pages.bars.sources import RIVALS, SHORT, BenchRows, Newest, Source, TableRows
from blocktune.kernels.values.shape import AttentionShape

FEATURES = "-features.bench.json"
SOFT = "-soft-features.bench.json"


def soft(features: str, rivals: Collection[str] = RIVALS) -> tuple[Source, ...]:
    """Return soft caps or windows of each device, which a bench of their own has or that of all features."""
    chosen = forwards(64, 128, features=features)
    return (*benches(SOFT, chosen, rivals), *benches(FEATURES, chosen, rivals))


def _biased(shape: AttentionShape) -> bool:
    """Return which shapes are forwards with ALiBi or a mask of all pairs, and nothing else."""
    return is_forward(shape) and shape.features.label in ("alibi", "boolean", "additive")


def in_8_bits(*dims: int, rival: str, column: str) -> Source:
    """Return 8-bit forwards of an H200 next to one contender."""
    rows = words(*(f"d{dim}" for dim in dims))
    return Newest(
        BenchRows(file="h200-fp8.bench.json", shapes=forwards(*dims), rivals=(rival,)),
        TableRows(file="h200.fp8.table.json", column=column, rival=SHORT[rival], rows=rows),
    )


def of_plain(*wanted: str) -> Source:
    """Return forwards with a feature of an H200 next to plain ones."""
    return Newest(
        *(
            TableRows(
                file=f"h200.{name}.table.json", column="of the plain rate", rival="plain call", rows=words(*wanted)
            )
            for name in ("biases", "alibi-round")
        )
    )


FORWARDS = (
    Bar(
        what="forward, 64 and 128 columns",
        least=1.0,
        mean=1.05,
        sources=(
            *benches(".bench.json", forwards(64, 128)),
            BenchRows(file="h200-sustained.bench.json", shapes=forwards(64, 128)),
        ),
    ),
    Bar(what="forward, 256 columns", least=1.0, sources=benches("-wide.bench.json", forwards(256))),
    Bar(
        what="forward, keys of 192 and values of 128 columns",
        least=1.02,
        sources=(
            Newest(
                BenchRows(file="h200-grouped-features.bench.json", shapes=forwards(192, narrow=True)),
                TableRows(
                    file="h200.heads-together.table.json",
                    column="over FlashAttention-4",
                    rival="FA4",
                    rows=words("d192/128"),
                ),
            ),
            TableRows(
                file="h100.queries.table.json",
                column="registers over FlashAttention-3",
                rival="FA3",
                rows=words("d192/128"),
            ),
        ),
        limit=f"The group of the last head ended late; the H200 has groups that end together. {BIASES}.",
    ),
    Bar(
        what="forward, groups of 4, 8 and 16",
        least=1.02,
        sources=(BenchRows(file="h200-grouped-features.bench.json", shapes=forwards(64, 128, grouped=True)),),
    ),
    Bar(
        what="forward, 32k to 128k tokens",
        least=1.0,
        sources=benches("-long.bench.json", forwards(128)),
        limit=(
            f"{POWER} In the run of the H100 FlashAttention-3 always followed a contender that draws less power. "
            "[The table](forward.md#long-contexts) has the spread of the rounds."
        ),
    ),
    Bar(
        what="forward, soft cap",
        least=1.0,
        ratio="over FA3",
        sources=soft("softcap", ("fa3",)),
    ),
    Bar(
        what="forward, soft cap",
        least=1.3,
        ratio="over FA4",
        sources=soft("softcap", ("fa4",)),
    ),
    Bar(
        what="forward, window of 1024",
        least=1.0,
        sources=soft("window=1023:-1"),
    ),
    Bar(
        what="8-bit forward, 64 and 128 columns",
        least=1.03,
        ratio="over FA3 in 8 bits",
        sources=(in_8_bits(64, 128, rival="fa3", column="over FlashAttention-3"),),
        limit=(
            "At 64 columns special functions are the busiest unit, at 128 with many keys the card's power limit holds "
            f"the clock down. {EIGHT_BITS}."
        ),
    ),
    Bar(
        what="8-bit forward, 64 and 128 columns",
        least=1.0,
        ratio="over our 16 bits",
        sources=(in_8_bits(64, 128, rival="bfloat16", column="over our 16 bits"),),
        limit=(
            "Products of 64 columns are short in 16 bits already, so that exponentials decide; with few keys the "
            f"transposing of values. {EIGHT_BITS}."
        ),
    ),
    Bar(
        what="8-bit forward, 256 columns",
        least=1.0,
        ratio="over FA3 in 8 bits",
        sources=(in_8_bits(256, rival="fa3", column="over FlashAttention-3"),),
        limit=f"With few keys the pass that transposes values counts. {EIGHT_BITS}.",
    ),
    Bar(
        what="forward, ALiBi",
        least=0.9,
        ratio="of the plain rate",
        sources=(of_plain("alibi"),),
        limit=(
            "The issue of instructions: with 64 columns a score has four to five, and takes one more. Lines that the "
            f"tensor cores make reached 0.895 and are not built in. {BIASES}."
        ),
    ),
    Bar(
        what="forward, boolean and additive masks",
        least=0.75,
        ratio="of the plain rate",
        sources=(of_plain("boolean", "additive"),),
        limit=f"An additive mask of 64 columns is read from the L2 and unpacked, two instructions a score. {BIASES}.",
    ),
    Bar(
        what="forward, dropout",
        least=0.55,
        ratio="of the plain rate",
        sources=(of_plain("dropout"),),
        limit=(
            "Instructions of Philox, a third of a step at 64 columns: two warps on one scheduler hardly cover each "
            f"other's stalls. {BIASES}."
        ),
    ),
    Bar(
        what="forward, ALiBi and masks",
        least=1.2,
        sources=(
            Newest(
                BenchRows(file=f"h200{FEATURES}", shapes=_biased),
                TableRows(
                    file="h200.biases.table.json",
                    column="over PyTorch",
                    rival="PyTorch",
                    rows=words("alibi", "boolean", "additive"),
                ),
            ),
        ),
    ),
)
