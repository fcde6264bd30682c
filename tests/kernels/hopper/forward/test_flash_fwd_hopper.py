"""The Hopper forward: its rules, and its machine code compiled without a GPU.

What its source computes is tested in test_flash_fwd_hopper_source.py, results in test_flash_fwd_hopper_gpu.py.
"""

import re
from itertools import product
from typing import Any

import pytest
import torch

from blocktune.kernels.base.paper_rule import paper_config
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.hopper.forward.launch import NO_CACHE
from blocktune.kernels.hopper.forward.layout import WIDTHS, heads_together, shares_memory
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.cost.estimated_resources import estimated_resources
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.occupancy.calculator import occupancy

HOPPER = limits_for((9, 0))
KERNEL = FlashForwardHopper()
MASKS = (Causal.NONE, Causal.UPPER_LEFT)


def shape(
    head_dim: int = 64, seqlen: int = 8192, causal: Causal = Causal.NONE, features: str = "", **changes: Any
) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 8, "seqlen_q": seqlen, "seqlen_k": seqlen}
    sizes |= {"head_dim": head_dim, "head_dim_v": head_dim}
    return AttentionShape(**sizes | {"causal": causal, "features": Features.parse(features)} | changes)


def loaded(
    head_dim: int, seqlen: int, causal: Causal = Causal.NONE, features: str = "", **changes: Any
) -> AttentionShape:
    """Enough for all multiprocessors, as measured: 16,384 tokens, about 2,048 columns of all heads."""
    heads = 2048 // head_dim
    sizes = {"batch": 16384 // seqlen, "num_heads": heads, "num_heads_kv": heads}
    return shape(head_dim, seqlen, causal, features, **sizes | changes)


def config(**changes: int) -> KernelConfig:
    smallest = {name: min(choices) for name, choices in KERNEL.parameters.items()}
    return KernelConfig.of(KERNEL.name, smallest | changes)


# ---- rules


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (shape(dtype="float32"), "computes float16 and bfloat16, but got float32"),
        (shape(16), r"`24 <= head_dim <= 256`, a multiple of 8, must hold .* head_dim=16"),
        (shape(100), r"a multiple of 8, must hold .* head_dim=100"),
        (shape(264), r"`24 <= head_dim <= 256`, .* head_dim=264"),
        (shape(128, head_dim_v=36), r"`24 <= head_dim_v <= 256`, .* head_dim_v=36"),
        (shape(features="block_sparse"), "does not know block_sparse"),
        (shape(features="tree window=3:0 cached"), "does not know tree"),
        (shape(features="cached page=4"), "`page_size >= 8` must hold"),
        (shape(seqlen_q=32, features="cached page=16"), "`seqlen_q > 32` must hold over a cache"),
    ],
)
def test_shapes_that_it_leaves_to_others(problem: AttentionShape, reason: str) -> None:
    told = KERNEL.unsupported(problem, HOPPER)
    assert told is not None
    assert re.search(reason, told)
    assert KERNEL.violations(config(), problem, HOPPER) == (told,)


@pytest.mark.parametrize("cc", [cc for cc in known_ccs() if cc != (9, 0)], ids=str)
def test_only_hopper_has_wgmma(cc: tuple[int, int]) -> None:
    assert f"(compute capability 9.0 alone), but got {cc[0]}.{cc[1]}" in (
        KERNEL.unsupported(shape(), limits_for(cc)) or ""
    )


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [*product((64, 128, 192, 256), repeat=2), (40, 72), (96, 96)])
def test_default_config_is_feasible(head_dim: int, head_dim_v: int, causal: Causal) -> None:
    for seqlen_q, seqlen_k, features in product(
        (1, 1000, 16384),
        (77, 4096, 1 << 20),
        ("", "window=9:3", "varlen softcap", "alibi", "boolean", "additive dropout"),
    ):
        lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim_v": head_dim_v}
        problem = shape(head_dim, causal=causal, features=features, **lengths)
        assert KERNEL.unsupported(problem, HOPPER) is None
        assert KERNEL.violations(KERNEL.default_config(problem, HOPPER), problem, HOPPER) == ()


@pytest.mark.parametrize(
    ("problem", "values"),
    [
        *((loaded(64, 4096, causal), (256, 64, 4, 0, 1, 0, 0, 0)) for causal in MASKS),
        (loaded(64, 8192), (192, 128, 4, 0, 1, 0, 0, 0)),
        *((loaded(64, seqlen, Causal.UPPER_LEFT), (256, 64, 4, 0, 1, 0, 0, 0)) for seqlen in (6000, 8192, 16384)),
        (loaded(64, 4096, Causal.UPPER_LEFT, "window=1023:-1"), (192, 64, 4, 0, 1, 0, 64, 0)),
        (loaded(64, 2048, Causal.UPPER_LEFT, "window=2046:-1"), (256, 64, 3, 0, 1, 0, 0, 0)),
        (loaded(64, 1000, Causal.UPPER_LEFT, "varlen"), (192, 64, 4, 0, 1, 0, 64, 0)),
        (loaded(64, 4600, Causal.UPPER_LEFT, "varlen"), (256, 64, 4, 0, 1, 0, 0, 0)),
        (shape(64, 852, causal=True, batch=19, num_heads=32), (128, 64, 4, 0, 0, 1, 64, 0)),  # four have a tile more
        (shape(64, 1300, causal=True, batch=12, num_heads=32), (192, 64, 4, 0, 1, 0, 64, 0)),
        (shape(96, 3978, batch=4, num_heads=21, num_heads_kv=7), (192, 64, 4, 0, 0, 0, 0, 0)),
        (
            shape(96, 1400, batch=12, num_heads=20, num_heads_kv=5),
            (128, 128, 3, 0, 0, 0, 0, 0),
        ),  # three consumers have more rows
        (shape(96, 798, causal=True, batch=20, num_heads=21, num_heads_kv=7), (128, 64, 4, 0, 0, 1, 64, 0)),
        (shape(192, 7497, batch=2, num_heads=10, num_heads_kv=5), (128, 64, 3, 0, 0, 0, 0, 0)),  # with keys left over
        (shape(128, 600, batch=27, num_heads=16), (128, 64, 4, 0, 0, 0, 128, 0)),
        (shape(128, 900, batch=18, num_heads=16), (192, 64, 4, 0, 1, 0, 0, 0)),
        (loaded(64, 4096, seqlen_q=100), (128, 128, 4, 0, 0, 1, 0, 0)),
        (loaded(96, 4096, Causal.UPPER_LEFT), (128, 128, 3, 0, 0, 0, 0, 0)),
        (loaded(128, 1024), (128, 64, 4, 0, 0, 0, 128, 0)),
        (loaded(128, 1536, Causal.UPPER_LEFT), (128, 64, 4, 0, 0, 0, 128, 0)),
        (loaded(128, 2048, Causal.UPPER_LEFT), (128, 64, 4, 0, 0, 0, 64, 0)),
        (loaded(128, 1024, Causal.UPPER_LEFT, "softcap"), (128, 64, 4, 0, 0, 1, 128, 0)),
        (loaded(128, 4096, Causal.UPPER_LEFT, "softcap"), (192, 64, 4, 0, 1, 0, 64, 0)),
        *((loaded(128, seqlen), (192, 64, 3, 0, 0, 0, 0, 0)) for seqlen in (2048, 4096, 8192, 16384)),
        (
            loaded(128, 2048, batch=1),
            (128, 128, 2, 1, 0, 0, 0, 0),
        ),  # three consumers: two turns of 192 rows, not of 128
        (loaded(128, 2048, batch=2), (128, 128, 3, 0, 0, 0, 0, 0)),
        *((loaded(128, seqlen, Causal.UPPER_LEFT), (192, 64, 4, 1, 1, 0, 0, 0)) for seqlen in (4096, 8192)),
        (loaded(128, 8192, Causal.UPPER_LEFT, num_heads_kv=4), (128, 128, 4, 2, 0, 0, 0, 0)),
        (loaded(128, 8192, Causal.UPPER_LEFT, batch=1), (128, 128, 4, 2, 0, 0, 0, 0)),  # few tiles
        (loaded(128, 6000, Causal.UPPER_LEFT, batch=4), (128, 128, 4, 2, 0, 0, 0, 0)),
        (loaded(128, 4096, Causal.UPPER_LEFT, "window=1023:-1"), (192, 64, 4, 0, 1, 0, 0, 0)),
        (loaded(128, 4096, Causal.UPPER_LEFT, "varlen"), (192, 64, 4, 0, 1, 0, 64, 0)),
        (shape(192, 1000, head_dim_v=128), (128, 128, 2, 1, 1, 1, 0, 0)),  # with keys left over
        (loaded(256, 4096, Causal.UPPER_LEFT, "window=1023:-1"), (128, 64, 4, 2, 1, 0, 128, 1)),
        (shape(192, head_dim_v=128), (128, 64, 3, 0, 0, 0, 192, 0)),
        (shape(192), (128, 64, 3, 0, 0, 0, 64, 0)),
        *((loaded(256, 4096, causal), (128, 64, 4, 2, 1, 0, 128, 1)) for causal in MASKS),
        (loaded(256, 4096, Causal.UPPER_LEFT, "dropout"), (128, 64, 2, 1, 1, 1, 0, 0)),
        (shape(256, head_dim_v=128), (128, 64, 2, 1, 0, 0, 0, 0)),
        (loaded(128, 4096, Causal.UPPER_LEFT, "alibi"), (192, 64, 4, 0, 1, 0, 64, 0)),
        (loaded(128, 4096, features="alibi"), (128, 128, 4, 2, 0, 0, 0, 0)),
        (loaded(128, 4096, Causal.UPPER_LEFT, "boolean"), (128, 128, 4, 2, 1, 1, 0, 0)),
        *((loaded(128, 2048, causal, "additive"), (192, 64, 4, 0, 1, 0, 0, 0)) for causal in MASKS),
        (loaded(128, 2048, features="additive", batch=1), (128, 128, 2, 1, 1, 1, 0, 0)),
        (loaded(128, 4096, Causal.UPPER_LEFT, "window=1023:-1 additive"), (128, 128, 2, 1, 1, 1, 0, 0)),
        (loaded(64, 4096, features="additive"), (192, 64, 4, 0, 1, 1, 64, 0)),
        *((loaded(64, 4096, causal, "alibi"), (256, 64, 4, 0, 1, 0, 0, 0)) for causal in MASKS),
        (loaded(64, 4000, features="alibi"), (256, 64, 4, 0, 1, 1, 0, 0)),
        (loaded(64, 8192, features="alibi"), (192, 128, 4, 0, 1, 0, 0, 0)),
        (loaded(128, 2048, features="boolean"), (192, 64, 4, 0, 1, 0, 0, 0)),
        (loaded(128, 2048, features="boolean", batch=1), (128, 128, 2, 1, 1, 1, 0, 0)),
        (loaded(128, 4096, Causal.UPPER_LEFT, "dropout"), (128, 64, 4, 0, 0, 0, 128, 0)),
        (loaded(64, 8192, features="boolean alibi"), (256, 64, 4, 0, 1, 0, 0, 0)),
        (loaded(64, 8192, features="dropout"), (128, 128, 4, 0, 0, 1, 0, 0)),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionShape) else "x".join(map(str, value)),
)
def test_default_config_is_what_won(problem: AttentionShape, values: tuple[int, ...]) -> None:
    names = ("block_m", "block_n", "num_stages", "split_release", "early_p", "keep_p", "q_registers", "output_panels")
    found = KERNEL.default_config(problem, HOPPER).parameters
    assert tuple(found[name] for name in names) == values


@pytest.mark.parametrize(
    ("problem", "together"),
    [
        (loaded(128, 16384, Causal.UPPER_LEFT), 4),  # what the L2 cache holds
        (shape(192, 16384, Causal.UPPER_LEFT, head_dim_v=128), 4),  # 3 would leave one
        (shape(192, 8192, Causal.UPPER_LEFT, num_heads=16, head_dim_v=128), 7),  # 6 would leave two
        (shape(192, 32768, Causal.UPPER_LEFT, head_dim_v=128), 1),
        (shape(128, 512, Causal.UPPER_LEFT), 16),  # all that there are
    ],
    ids=str,
)
def test_heads_that_causal_calls_take_together(problem: AttentionShape, together: int) -> None:
    assert heads_together(config(block_m=128), problem) == together


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_m", 64), ("block_n", 32), ("num_warps", 8), ("num_stages", 1), ("split_release", 3), ("keep_p", -1)],
)
def test_parameter_out_of_range(name: str, value: int) -> None:
    assert KERNEL.violations(config(**{name: value}), shape(), HOPPER) == (
        f"`{name}` of {KERNEL.name} must be one of {KERNEL.parameters[name]}, but got {value}.",
    )


@pytest.mark.parametrize(
    ("problem", "own", "problem_text"),
    [
        (shape(256), {"q_registers": 128, "early_p": 1}, None),
        (shape(256), {"q_registers": 128}, "too slow, because products spill .* but got 224 of 216"),
        (shape(128), {"block_m": 192, "q_registers": 64, "early_p": 1}, None),
        (shape(128), {"block_m": 192, "q_registers": 128, "early_p": 1}, "too slow, .* but got 144 of 136"),
        (shape(64), {"block_m": 256, "early_p": 1}, None),
        (shape(64), {"block_m": 256}, "too slow, .* but got 96 of 88"),
        (shape(128), {"block_m": 256, "block_n": 128}, "too slow, .* but got 192 of 88"),
        (shape(192, head_dim_v=128), {"q_registers": 192, "block_n": 128, "early_p": 1}, None),
        (
            shape(256, head_dim_v=64),
            {"q_registers": 192},
            "must divide 256, the head_dim of a part of Q, or be all 256",
        ),
        (shape(96), {"q_registers": 128}, "must divide 64, the head_dim of a part of Q, or be all 96"),
        (shape(64), {"q_registers": 128}, "must divide 64, the head_dim of a part of Q, or be all 64"),
    ],
    ids=str,
)
def test_products_fit_into_the_registers_of_a_consumer(
    problem: AttentionShape, own: dict[str, int], problem_text: str | None
) -> None:
    """What ptxas compiles without waiting for each product (C7512)."""
    told = KERNEL.omissions(config(**own), problem, HOPPER)
    assert len(told) == (problem_text is not None)
    assert problem_text is None or re.search(problem_text, told[0])
    assert bool(KERNEL.violations(config(**own), problem, HOPPER)) == ("must divide" in (problem_text or ""))


@pytest.mark.parametrize(
    ("problem", "num_stages", "split_release", "problem_text"),
    [
        (shape(256), 5, 2, None),
        (shape(128), 3, 2, None),
        (shape(128), 2, 2, "`num_stages` must be at least 3 with one ring, but got 2."),
        (shape(64), 5, 1, "`num_stages` must be at most 4 where K and V share a slot, but got 5."),
        (shape(192), 3, 2, "`split_release` must be 0 or 1 where head_dim is padded to 192 and head_dim_v to 192."),
        (
            shape(128, head_dim_v=64),
            3,
            2,
            "`split_release` must be 0 or 1 where head_dim is padded to 128 and head_dim_v to 64.",
        ),
    ],
    ids=str,
)
def test_slots_of_pairs_and_of_one_ring(
    problem: AttentionShape, num_stages: int, split_release: int, problem_text: str | None
) -> None:
    told = KERNEL.violations(config(num_stages=num_stages, split_release=split_release), problem, HOPPER)
    assert told == (() if problem_text is None else (problem_text,))


def test_a_slot_of_one_ring_holds_one_tile() -> None:
    problem, own = shape(256), config(num_stages=5, split_release=2)
    assert KERNEL.shared_bytes(own, problem, HOPPER) == (2 + 5) * 64 * 256 * 2
    slots = next(tile for tile in KERNEL.own_tiles(own, problem, HOPPER).tiles if tile.name == "K or V, in turns")
    assert slots.count == 5


def test_own_parameters_are_exactly_the_kernel_s() -> None:
    (unknown,) = KERNEL.violations(config(schedule=1), shape(), HOPPER)
    assert f"{KERNEL.name} has the parameters {tuple(KERNEL.parameters)}" in unknown
    missing = KERNEL.rule_violations(KernelConfig(KERNEL.name, 128, 64, 4, 2), shape(), HOPPER)
    assert [text.split("`")[1] for text in missing] == [
        "split_release",
        "early_p",
        "keep_p",
        "q_registers",
        "output_panels",
    ]


@pytest.mark.parametrize(("width", "width_v"), list(product(WIDTHS, repeat=2)))
def test_barriers_fit_beside_the_largest_tiles(width: int, width_v: int) -> None:
    """`shared_bytes` leaves out up to 1 KiB, which decides nothing: no config comes that near to what a block has."""
    problem = shape(width, head_dim_v=width_v)
    space = SearchSpace.build(problem, HOPPER, [KERNEL])
    sizes = [KERNEL.shared_bytes(found, problem, HOPPER) for found in space.feasible]
    assert max(sizes) + 1024 <= HOPPER.shared_per_block_optin_bytes


def test_the_output_leaves_where_q_was_if_there_is_no_room() -> None:
    two, three = config(block_n=128), config(block_n=128, num_stages=3)
    assert not shares_memory(two, shape(128))
    assert KERNEL.shared_bytes(two, shape(128), HOPPER) == 4 * 32768 + 65536
    assert shares_memory(three, shape(128))
    assert KERNEL.shared_bytes(three, shape(128), HOPPER) == 6 * 32768 + 32768
    assert shares_memory(config(), shape(256))
    assert not shares_memory(config(output_panels=1), shape(256))
    assert KERNEL.shared_bytes(config(output_panels=1), shape(256), HOPPER) == 6 * 32768 + 32768
    for width in (128, 192):
        (text,) = KERNEL.violations(config(output_panels=1), shape(width), HOPPER)
        assert f"`output_panels` must be 0 at head_dim_v {width}," in text
    assert not shares_memory(config(), shape(64, head_dim_v=256))  # the output is larger than Q
    too_large = config(block_m=128, block_n=128, num_stages=4)
    (text,) = KERNEL.violations(too_large, shape(128), HOPPER)
    assert "needs 294912 B" in text


# ---- masks

FREE, RAGGED, TO_THE_RIGHT = (
    {"RAGGED": False, "RIGHT": False},
    {"RAGGED": True, "RIGHT": False},
    {"RAGGED": False, "RIGHT": True},
)
PLAIN = {"LEFT": False, "LOWER_RIGHT": False}


@pytest.mark.parametrize(
    ("problem", "bounds", "constants"),
    [
        (shape(), (0, 0), FREE | PLAIN | {"ALIGNED": True}),
        (shape(seqlen_k=1000), (0, 0), RAGGED | PLAIN | {"ALIGNED": True}),
        (shape(seqlen=1000, causal=Causal.UPPER_LEFT), (0, 0), TO_THE_RIGHT | PLAIN | {"ALIGNED": True}),
        (
            shape(seqlen_q=1000, seqlen_k=1300, causal=Causal.LOWER_RIGHT),
            (300, 0),
            TO_THE_RIGHT | PLAIN | {"ALIGNED": False},
        ),
        (
            shape(seqlen_q=1000, seqlen_k=1512, causal=Causal.LOWER_RIGHT),
            (512, 0),
            TO_THE_RIGHT | PLAIN | {"ALIGNED": True},
        ),
        (
            shape(seqlen_q=1300, seqlen_k=1000, causal=Causal.LOWER_RIGHT),
            (-300, 0),
            TO_THE_RIGHT | PLAIN | {"ALIGNED": False},
        ),
        (
            shape(seqlen_q=1300, seqlen_k=1000, causal=Causal.UPPER_LEFT),
            (0, 0),
            {"RAGGED": True, "RIGHT": True, "ALIGNED": True} | PLAIN,
        ),
        (
            shape(seqlen_q=1000, seqlen_k=1300, features="window=30:20"),
            (320, 270),
            {"RAGGED": True, "RIGHT": True, "LEFT": True, "LOWER_RIGHT": False, "ALIGNED": False},
        ),
        (shape(features="window=-1:64"), (64, 0), {"RAGGED": False, "RIGHT": True, "ALIGNED": True} | PLAIN),
        (shape(features="varlen"), (0, 0), RAGGED | PLAIN | {"ALIGNED": False}),
        (
            shape(features="varlen window=30:5", causal=Causal.LOWER_RIGHT),
            (0, -30),
            {"RAGGED": False, "RIGHT": True, "LEFT": True, "LOWER_RIGHT": True, "ALIGNED": False},
        ),
        (
            shape(features="varlen", causal=Causal.UPPER_LEFT),
            (0, 0),
            {"RAGGED": True, "RIGHT": True, "ALIGNED": False} | PLAIN,
        ),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionShape) else "",
)
def test_bounds_of_every_mask(problem: AttentionShape, bounds: tuple[int, int], constants: dict[str, bool]) -> None:
    spec = KERNEL.compile_spec(config(), problem)
    options = spec.constexprs[(spec.function.arg_names.index("OPTIONS"),)]
    assert {name: getattr(options, name) for name in constants} == constants
    arguments = KERNEL.bind(config(), problem).trailing(*[torch.empty(1, 8, 5, 64)] * 4)
    # of the log-sum-exp: of packed sequences they change with every call, and so does what a cache has
    rows = () if problem.features else (5, *NO_CACHE)
    assert arguments[: len(rows)] == rows
    assert arguments[len(rows) + 6 : len(rows) + 8] == bounds


# ---- what the models make of it


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", MASKS)
def test_the_models_order_every_config(head_dim: int, causal: Causal) -> None:
    problem, device = shape(head_dim, causal=causal), device_named("h200")
    space = SearchSpace.build(problem, HOPPER, [KERNEL])
    for found in space.feasible:
        estimated = estimated_resources(KERNEL, found, problem, device)
        assert estimated.num_warps == KERNEL.total_warps(found)
        assert occupancy(estimated, HOPPER).blocks_per_sm == 1
    best = KERNEL.default_config(problem, HOPPER)
    assert estimated_resources(KERNEL, best, problem, device).spill_bytes == 0
    rate = problem.flops / usefulness(KERNEL, best, problem, device) / 1e6
    assert 300 < rate < 989  # TFLOP/s: of an H200, which has 989 at most


def test_the_models_know_which_threads_compute() -> None:
    """128 rows of two consumers: registers as launched; tiles of 96 registers a thread spill where 112 can be had."""
    device = device_named("h200")
    found = {
        block_m: estimated_resources(KERNEL, config(block_m=block_m, block_n=128), shape(), device)
        for block_m in (128, 192, 256)
    }
    assert [(held.num_warps, held.registers) for held in found.values()] == [(12, 168), (16, 128), (20, 96)]
    assert [held.spill_bytes > 0 for held in found.values()] == [False, False, True]


def test_paper_config() -> None:
    found = paper_config(KERNEL, shape(128), HOPPER)
    assert found is not None
    assert (found.block_m, found.block_n, found.num_stages) == (128, 128, 2)  # its smallest stages
    assert KERNEL.violations(found, shape(128), HOPPER) == ()
    assert paper_config(KERNEL, shape(64), HOPPER) is None  # 64 queries at most, and two consumers have 128
