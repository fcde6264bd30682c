"""The targets of forwards."""

from tools.pages.targets.choices import biased_shapes, forwards, words
from tools.pages.targets.sources import SHORT, Source
from tools.pages.targets.target import BIASES, EIGHT_BITS, NEWEST_CUDNN, POWER, Target, benches, feature_benches, tables

GROUPED = "-grouped-features.bench.json"


def in_8_bits(*dims: int, rival: str, column: str) -> tuple[Source, ...]:
    """Return 8-bit forwards of each device next to one contender."""
    rows = words(*(f"d{dim}" for dim in dims))
    return (
        *benches("-fp8.bench.json", forwards(*dims), (rival,)),
        *tables(".fp8.table.json", column, SHORT[rival], rows),
    )


def of_plain(*wanted: str) -> tuple[Source, ...]:
    """Return forwards with a feature on each device next to plain ones."""
    names = (".biases.table.json", ".alibi-round.table.json")
    return tuple(source for name in names for source in tables(name, "of the plain rate", "plain call", words(*wanted)))


FORWARDS = (
    Target(
        what="forward, head_dim 64 and 128",
        least=1.0,
        mean=1.05,
        sources=(*benches(".bench.json", forwards(64, 128)), *benches("-sustained.bench.json", forwards(64, 128))),
    ),
    Target(
        what="forward, head_dim 256",
        least=1.0,
        sources=benches("-wide.bench.json", forwards(256)),
        limit=(
            "At 512 tokens the H100's memory: to read the inputs and write the output takes seven tenths of the time "
            "at its full rate."
        ),
    ),
    Target(
        what="forward, head_dim 192 of keys and 128 of values",
        least=1.02,
        sources=(
            *benches(GROUPED, forwards(192, narrow=True)),
            *tables(".heads-together.table.json", "over FlashAttention-4", "FA4", words("d192/128")),
            *tables(".queries.table.json", "registers over FlashAttention-3", "FA3", words("d192/128")),
        ),
        limit=f"The group of the last head ended late; the H200 has groups that end together. {BIASES}.",
    ),
    Target(
        what="forward, groups of 4, 8 and 16",
        least=1.02,
        sources=benches(GROUPED, forwards(64, 128, grouped=True)),
    ),
    Target(
        what="forward, 32k to 128k tokens",
        least=1.0,
        sources=benches("-long.bench.json", forwards(128)),
        limit=f"{POWER} [The table](forward.md#long-contexts) has the spread of the rounds.",
    ),
    Target(
        what="forward, next to the newest cuDNN",
        least=1.0,
        ratio="over cuDNN 9.28",
        sources=benches(NEWEST_CUDNN, forwards(64, 128, 256), ("cudnn",)),
    ),
)

CAPPED_FORWARDS = (
    Target(
        what="forward, soft cap",
        least=1.0,
        ratio="over FA3",
        sources=feature_benches(forwards(64, 128, features="softcap"), ("fa3",)),
    ),
    Target(
        what="forward, soft cap",
        least=1.3,
        ratio="over FA4",
        sources=feature_benches(forwards(64, 128, features="softcap"), ("fa4",)),
    ),
    Target(
        what="forward, window of 1024",
        least=1.0,
        sources=feature_benches(forwards(64, 128, features="window=1023:-1")),
    ),
)

EIGHT_BIT_FORWARDS = (
    Target(
        what="8-bit forward, head_dim 64 and 128",
        least=1.03,
        ratio="over FA3 in 8 bits",
        sources=in_8_bits(64, 128, rival="fa3", column="over FlashAttention-3"),
        limit=(
            "At head_dim 64 special functions are the busiest unit, at 128 with many keys the card's power limit holds "
            f"the clock down. {EIGHT_BITS}."
        ),
    ),
    Target(
        what="8-bit forward, head_dim 64 and 128",
        least=1.0,
        ratio="over our 16 bits",
        sources=in_8_bits(64, 128, rival="bfloat16", column="over our 16 bits"),
        limit=(
            "Products of head_dim 64 are short in 16 bits already, so that exponentials decide; with few keys the "
            f"transposing of values. {EIGHT_BITS}."
        ),
    ),
    Target(
        what="8-bit forward, head_dim 256",
        least=1.0,
        ratio="over FA3 in 8 bits",
        sources=in_8_bits(256, rival="fa3", column="over FlashAttention-3"),
        limit=f"With few keys the pass that transposes values counts. {EIGHT_BITS}.",
    ),
)

BIASED_FORWARDS = (
    Target(
        what="forward, ALiBi",
        least=0.9,
        ratio="of the plain rate",
        sources=of_plain("alibi"),
        limit=(
            "The tensor cores make a line for every block of keys, 16 dimensions more in one product, an eighth of "
            f"all products at head_dim 64. {BIASES}."
        ),
    ),
    Target(
        what="forward, boolean and additive masks",
        least=0.75,
        ratio="of the plain rate",
        sources=of_plain("boolean", "additive"),
        limit=(
            "An additive mask at head_dim 64 is read from the L2 by every head, as many bytes as K and V, unpacked. "
            f"{BIASES}."
        ),
    ),
    Target(
        what="forward, dropout",
        least=0.55,
        ratio="of the plain rate",
        sources=of_plain("dropout"),
        limit=(
            "Instructions of Philox, a third of a step at head_dim 64: two warps on one scheduler hardly cover each "
            f"other's stalls. {BIASES}."
        ),
    ),
    Target(
        what="forward, ALiBi and masks",
        least=1.2,
        sources=feature_benches(biased_shapes(forwards)),
    ),
    Target(
        what="forward, ALiBi and masks",
        least=1.2,
        ratio="over PyTorch's fastest",
        sources=tables(".biases.table.json", "over PyTorch", "PyTorch", words("alibi", "boolean", "additive")),
    ),
)
