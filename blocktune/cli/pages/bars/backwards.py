"""The bars of backwards."""

from blocktune.cli.pages.bars.bar import AHEAD, BACKWARD_BIASES, DEVICES, POWER, STEP, Bar, benches
from blocktune.cli.pages.bars.choices import Chosen, backwards, block_masked, words
from blocktune.cli.pages.bars.sources import BenchRows, Newest, PeerRows, Source, TableRows

PEER_FILES = (
    "-apart.backward-peers.json", "-flash4.backward-peers.json", "-ahead.backward-peers.json", ".backward-peers.json",
)  # fmt: skip
"""What tests/programs/bench/backward_peers.py has written."""

FULL = (
    "Full walks: the banks of shared memory are at work for 89 % of the time, as FlashAttention-4's are, whose steps "
    "of 80 queries access them 5 % less; the card is at its power limit."
)
TURNS = "Blocks of keys add in turns and wait for each other ([how](../kernels/hopper_backward.md))."
ANY_ORDER, DENSE = "in any order", "dense"


def rows(bench: str, chosen: Chosen) -> tuple[Source, ...]:
    """Return the newest measurement of backwards next to peers on each device, from a bench or from the program."""
    return tuple(
        Newest(
            BenchRows(file=f"{device}{bench}", shapes=chosen),
            *(PeerRows(file=f"{device}{file}", shapes=chosen) for file in PEER_FILES),
        )
        for device in DEVICES
    )


def next_to(rival: str, chosen: Chosen, *, of_share: bool = False) -> tuple[Source, ...]:
    """Return the newest measurement next to one contender on each device."""
    return tuple(
        Newest(
            *(
                PeerRows(file=f"{device}{file}", shapes=chosen, rivals=(rival,), of_share=of_share)
                for file in PEER_FILES
            )
        )
        for device in DEVICES
    )


def in_tables(column: str, rival: str, *wanted: str) -> tuple[Source, ...]:
    """Return backwards with a feature on each device."""
    return tuple(
        TableRows(file=f"{device}.backward-biases.table.json", column=column, rival=rival, rows=words(*wanted))
        for device in DEVICES
    )


PLAIN, FEATURES, GROUPED, WIDE = (
    "-backward.bench.json",
    "-features.bench.json",
    "-grouped-features.bench.json",
    "-backward-wide.bench.json",
)

BACKWARDS = (
    Bar(
        what="backward, 128 columns", least=1.0, mean=1.03, sources=rows(PLAIN, backwards(128)), limit=f"{FULL} {STEP}."
    ),
    Bar(
        what="backward, 64 columns",
        least=1.0,
        mean=1.03,
        sources=rows(PLAIN, backwards(64)),
        limit=(
            "An H100's full walks were measured before two warps added their dQ ([what that gains]"
            "(../kernels/lab_diary.md#steps-with-fewer-barriers))."
        ),
    ),
    Bar(
        what="backward, 256 columns",
        least=1.0,
        mean=1.3,
        ratio="over FA4",
        sources=benches(WIDE, backwards(256), ("fa4",)),
    ),
    Bar(
        what="backward, 256 columns",
        least=1.0,
        mean=1.3,
        sources=benches(WIDE, backwards(256)),
        limit=(
            "Warps wait for loads and for each other ([counters](../kernels/backward.md#what-limits-it)). The "
            "gradients of 64 keys leave no registers to issue the next products meanwhile."
        ),
    ),
    Bar(
        what="backward, groups of 4, 8 and 16",
        least=1.0,
        sources=rows(GROUPED, backwards(64, 128, grouped=True)),
        limit=(
            "The same step as without groups. Another process ran during h16/4, full, of the H100 ([table]"
            f"(../kernels/backward.md#groups-and-a-fixed-order)). {STEP}."
        ),
    ),
    Bar(
        what="backward, keys of 192 and values of 128 columns",
        least=1.0,
        sources=(BenchRows(file=f"h200{GROUPED}", shapes=backwards(192, narrow=True)),),
        limit=(
            "Warps wait for loads and for each other's dS in every step "
            "([counters](../kernels/backward.md#what-limits-it)), and no registers are left to issue the next scores "
            "meanwhile ([what was tried]"
            "(../kernels/lab_diary.md#keys-of-192-and-values-of-128-columns))."
        ),
    ),
    Bar(
        what="backward, 192 columns",
        least=1.0,
        sources=(PeerRows(file="h200.backward-peers.json", shapes=backwards(192)),),
        limit=(
            "Warps wait for each other and for loads, and the L2 is busier than FlashAttention-4's ([counters]"
            "(../kernels/backward.md#what-limits-it))."
        ),
    ),
    Bar(
        what="backward, lengths that no tile divides",
        least=1.0,
        sources=rows(FEATURES, backwards(64, 128, ragged=True)),
        limit=f"The same step; 4000 queries are 50 steps of FlashAttention-4's 80, and 62.5 of ours. {STEP}.",
    ),
    Bar(
        what="backward, window of 1024",
        least=1.0,
        sources=rows(FEATURES, backwards(64, 128, features="window=1023:-1")),
        limit=f"What stands between two tiles, and a last round that is half empty. {AHEAD}.",
    ),
    Bar(what="backward, soft cap", least=1.0, sources=rows(FEATURES, backwards(64, 128, features="softcap"))),
    Bar(
        what="backward, deterministic",
        least=1.0,
        ratio="over FA4's deterministic",
        sources=rows(FEATURES, backwards(64, 128, 256, features="deterministic")),
        limit=TURNS,
    ),
    Bar(
        what="backward, deterministic",
        least=1 / 1.1,
        ratio="of our rate in any order",
        sources=next_to(ANY_ORDER, backwards(64, 128, 256, features="deterministic")),
        limit=TURNS,
    ),
    Bar(
        what="backward, 32k to 128k tokens",
        least=1.0,
        sources=tuple(
            Newest(
                BenchRows(file=f"{device}-backward-long.bench.json"),
                BenchRows(file=f"{device}-long.bench.json", shapes=backwards(128)),
            )
            for device in DEVICES
        ),
        limit=f"{POWER} The step is that of shorter lengths. {STEP}.",
    ),
    Bar(
        what="backward, ALiBi",
        least=0.9,
        ratio="of the plain rate",
        sources=in_tables("of the plain rate", "plain call", "alibi"),
    ),
    Bar(
        what="backward, boolean and additive masks",
        least=0.75,
        ratio="of the plain rate",
        sources=in_tables("of the plain rate", "plain call", "boolean", "additive"),
        limit=f"An additive mask of long sequences is read by every head. See {BACKWARD_BIASES}.",
    ),
    Bar(
        what="backward, dropout",
        least=0.55,
        ratio="of the plain rate",
        sources=in_tables("of the plain rate", "plain call", "dropout"),
    ),
    Bar(
        what="backward, ALiBi and masks",
        least=1.2,
        ratio="over PyTorch's fastest",
        sources=in_tables("over PyTorch", "PyTorch", "alibi", "boolean", "additive"),
    ),
    Bar(
        what="backward, block masks",
        least=1.0,
        ratio="over FA4",
        sources=next_to("flash-attn-4", block_masked),
    ),
    Bar(
        what="backward, block masks",
        least=0.75,
        ratio="of our rate without the mask, on the pairs that take part",
        sources=next_to(DENSE, block_masked, of_share=True),
        limit=f"Tiles have few steps, so that what stands between two tiles counts. {AHEAD}.",
    ),
)
