"""The targets of backwards."""

from collections.abc import Collection

from tools.pages.recorded.backward_peer_tables import PEERS
from tools.pages.targets.choices import Chosen, backwards, biased_shapes, block_masked, words
from tools.pages.targets.sources import PeerRows, Source
from tools.pages.targets.target import (
    AHEAD,
    BACKWARD_BIASES,
    DEVICES,
    NEWEST_CUDNN,
    POWER,
    STEP,
    Target,
    benches,
    feature_benches,
    tables,
)

PEER_FILES = (
    "-apart.backward-peers.json", "-flash4.backward-peers.json", "-ahead.backward-peers.json", ".backward-peers.json",
)  # fmt: skip
"""What tools/bench/backward_peers.py has written."""

FULL = (
    "Full walks: the banks of shared memory are at work for 89 % of the time, as FlashAttention-4's are, whose steps "
    "of 80 queries access them 5 % less; the card is at its power limit."
)
TURNS = "Blocks of keys add in turns and wait for each other ([how](../kernels/hopper_backward.md))."
ANY_ORDER, DENSE = "in any order", "dense"
FIXED_ORDER = backwards(64, 128, 256, features="deterministic")


def programs(chosen: Chosen, rivals: Collection[str] = tuple(PEERS), *, of_share: bool = False) -> tuple[Source, ...]:
    """Return what the program says of backwards on each device, next to some contenders."""
    return tuple(
        PeerRows(file=f"{device}{file}", shapes=chosen, rivals=rivals, of_share=of_share)
        for device in DEVICES
        for file in PEER_FILES
    )


def rows(bench: str, chosen: Chosen) -> tuple[Source, ...]:
    """Return backwards next to rivals on each device, from a bench and from the program."""
    return (*benches(bench, chosen), *programs(chosen))


def with_features(chosen: Chosen) -> tuple[Source, ...]:
    """Return backwards with a feature next to rivals on each device, from benches and from the program."""
    return (*feature_benches(chosen), *programs(chosen))


def in_tables(column: str, rival: str, *wanted: str) -> tuple[Source, ...]:
    """Return backwards with a feature on each device."""
    return tables(".backward-biases.table.json", column, rival, words(*wanted))


PLAIN, GROUPED, WIDE = (
    "-backward.bench.json",
    "-grouped-features.bench.json",
    "-backward-wide.bench.json",
)

BACKWARDS = (
    Target(
        what="backward, head_dim 128",
        least=1.0,
        mean=1.03,
        sources=rows(PLAIN, backwards(128)),
        limit=f"{FULL} {STEP}.",
    ),
    Target(
        what="backward, head_dim 64",
        least=1.0,
        mean=1.03,
        sources=rows(PLAIN, backwards(64)),
    ),
    Target(
        what="backward, head_dim 256",
        least=1.0,
        mean=1.3,
        ratio="over FA4",
        sources=benches(WIDE, backwards(256), ("fa4",)),
    ),
    Target(
        what="backward, head_dim 256",
        least=1.0,
        mean=1.3,
        sources=benches(WIDE, backwards(256)),
        limit=(
            "Warps wait for loads and for each other ([counters](../kernels/backward.md#what-limits-it)). The "
            "gradients of 64 keys leave no registers to issue the next products meanwhile."
        ),
    ),
    Target(
        what="backward, groups of 4, 8 and 16",
        least=1.0,
        sources=rows(GROUPED, backwards(64, 128, grouped=True)),
        limit=f"The same step as without groups. {STEP}.",
    ),
    Target(
        what="backward, head_dim 192 of keys and 128 of values",
        least=1.0,
        sources=benches(GROUPED, backwards(192, narrow=True)),
    ),
    Target(
        what="backward, head_dim 192",
        least=1.0,
        sources=rows(PLAIN, backwards(192)),
        limit=(
            "Warps wait for each other and for loads, and the L2 is busier than FlashAttention-4's ([counters]"
            "(../kernels/backward.md#what-limits-it)): 64 keys, whose gradients fill both warpgroups, add to dq more "
            "often."
        ),
    ),
    Target(
        what="backward, lengths that no tile divides",
        least=1.0,
        sources=with_features(backwards(64, 128, ragged=True)),
        limit=f"The same step; 4000 queries are 50 steps of FlashAttention-4's 80, and 62.5 of ours. {STEP}.",
    ),
    Target(
        what="backward, 32k to 128k tokens",
        least=1.0,
        sources=(*benches("-backward-long.bench.json", backwards(128)), *benches("-long.bench.json", backwards(128))),
        limit=f"{POWER} The step is that of shorter lengths. {STEP}.",
    ),
    Target(
        what="backward, next to the newest cuDNN",
        least=1.0,
        ratio="over cuDNN 9.28",
        sources=benches(NEWEST_CUDNN, backwards(64, 128, 256), ("cudnn",)),
    ),
)

BACKWARD_FEATURES = (
    Target(
        what="backward, window of 1024",
        least=1.0,
        sources=with_features(backwards(64, 128, features="window=1023:-1")),
        limit=f"What stands between two tiles, and a last round that is half empty. {AHEAD}.",
    ),
    Target(what="backward, soft cap", least=1.0, sources=with_features(backwards(64, 128, features="softcap"))),
    Target(
        what="backward, deterministic",
        least=1.0,
        ratio="over FA4's deterministic",
        sources=(*feature_benches(FIXED_ORDER, ("fa4",)), *programs(FIXED_ORDER, ("flash-attn-4",))),
        limit=TURNS,
    ),
    Target(
        what="backward, deterministic",
        least=1 / 1.1,
        ratio="of our rate in any order",
        sources=programs(FIXED_ORDER, (ANY_ORDER,)),
        limit=(
            f"{TURNS} An H100 was measured before the last heads walked back under a diagonal ([what that gains]"
            "(../kernels/lab_diary.md#the-last-heads-walk-back))."
        ),
    ),
    Target(
        what="backward, ALiBi",
        least=0.9,
        ratio="of the plain rate",
        sources=in_tables("of the plain rate", "plain call", "alibi"),
    ),
    Target(
        what="backward, boolean and additive masks",
        least=0.75,
        ratio="of the plain rate",
        sources=in_tables("of the plain rate", "plain call", "boolean", "additive"),
        limit=f"An additive mask of long sequences is read by every head. See {BACKWARD_BIASES}.",
    ),
    Target(
        what="backward, dropout",
        least=0.55,
        ratio="of the plain rate",
        sources=in_tables("of the plain rate", "plain call", "dropout"),
    ),
    Target(
        what="backward, ALiBi and masks",
        least=1.2,
        sources=feature_benches(biased_shapes(backwards)),
    ),
    Target(
        what="backward, ALiBi and masks",
        least=1.2,
        ratio="over PyTorch's fastest",
        sources=in_tables("over PyTorch", "PyTorch", "alibi", "boolean", "additive"),
    ),
    Target(
        what="backward, block masks",
        least=1.0,
        ratio="over FA4",
        sources=programs(block_masked, ("flash-attn-4",)),
    ),
    Target(
        what="backward, block masks",
        least=0.75,
        ratio="of our rate without the mask, on the pairs that take part",
        sources=programs(block_masked, (DENSE,), of_share=True),
        limit=f"Tiles have few steps, so that what stands between two tiles counts. {AHEAD}.",
    ),
)
