"""The Hopper backward: its rules, its launches, and its machine code compiled without a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.hopper.backward.kernel import FlashBackwardHopper, options_of
from blocktune.kernels.hopper.common.descriptors import describe, is_describable
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.occupancy.calculator import occupancy
from tests.support.compiles.measures import compile_resources
from tests.support.machine_code.kernels import loops, machine_code
from tests.support.triton_modes import TRITON, compiled_here

HOPPER = limits_for((9, 0))
KERNEL = FlashBackwardHopper()
MASKS = (Causal.NONE, Causal.UPPER_LEFT)


def shape(head_dim: int = 64, seqlen: int = 2048, causal: Causal = Causal.NONE, **changes: Any) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 4, "seqlen_q": seqlen, "seqlen_k": seqlen}
    sizes |= {"head_dim": head_dim, "head_dim_v": head_dim}
    return AttentionShape(**{"causal": causal, "direction": Direction.BACKWARD} | sizes | changes)


def config(problem: AttentionShape, **changes: int) -> KernelConfig:
    return KernelConfig.of(KERNEL.name, KERNEL.default_config(problem, HOPPER).parameters | changes)


# ---- rules


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (shape(direction=Direction.FORWARD), "computes backward, but got a forward shape"),
        (shape(features=Features(mask=MaskKind.BLOCK_SPARSE)), "does not know block_sparse"),
        (shape(256, features=Features(dropout=True)), "no dropout for heads wider than 128, .* head_dim=256"),
        (shape(dtype="float32"), "computes float16 and bfloat16, but got float32"),
        (shape(16), r"`24 <= head_dim <= 256`, in steps of 8, must hold .* head_dim=16"),
        (shape(264), r"`24 <= head_dim <= 256`, in steps of 8, must hold .* head_dim=264"),
        (shape(128, head_dim_v=100), r"`24 <= head_dim_v <= 256`, in steps of 8, must hold .* head_dim_v=100"),
    ],
)
def test_shapes_that_it_leaves_to_others(problem: AttentionShape, reason: str) -> None:
    told = KERNEL.unsupported(problem, HOPPER)
    assert told is not None
    assert re.search(reason, told)


@pytest.mark.parametrize("cc", [cc for cc in known_ccs() if cc != (9, 0)], ids=str)
def test_only_hopper_has_wgmma(cc: tuple[int, int]) -> None:
    assert f"(compute capability 9.0 alone), but got {cc[0]}.{cc[1]}" in (
        KERNEL.unsupported(shape(), limits_for(cc)) or ""
    )


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen", [128, 1152, 16384, 1 << 20])
def test_default_config_is_feasible(head_dim: int, seqlen: int, causal: Causal) -> None:
    problem = shape(head_dim, seqlen, causal, num_heads_kv=2, dtype="float16")
    assert KERNEL.unsupported(problem, HOPPER) is None
    assert KERNEL.violations(KERNEL.default_config(problem, HOPPER), problem, HOPPER) == ()


def test_named_barriers_serve_the_exchange_and_the_release_apart() -> None:
    found = [options_of(config(shape(), named_barriers=number), shape()) for number in range(4)]
    answers = [(each.NAMED_EXCHANGE, each.NAMED_RELEASE) for each in found]
    assert answers == [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize(
    ("head_dim", "features", "adders", "panels", "slots"),
    [(64, "", True, (1, 1), 2), (64, "softcap", False, (1, 1), 1), (128, "", True, (1, 1), 2),
     (192, "deterministic", False, (3, 3), 1), (256, "", False, (4, 4), 1)],
)  # fmt: skip
def test_options_of_the_default_config(
    head_dim: int, features: str, adders: bool, panels: tuple[int, int], slots: int
) -> None:
    """Wide heads have panels, and add dQ themselves."""
    problem = shape(head_dim, features=Features.parse(features))
    found = options_of(config(problem), problem)
    answers = found.ADDERS, (found.PANELS, found.V_PANELS), found.DQ_SLOTS
    assert answers == (adders, panels, slots)


FEATURES = ("", "window=100:20", "softcap", "varlen", "deterministic", "varlen softcap deterministic window=9:-1")


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 160, 192, 256])
def test_default_config_of_general_shapes_is_feasible(head_dim: int, features: str) -> None:
    for causal in Causal:
        problem = shape(head_dim, 1000, causal, seqlen_k=777, num_heads_kv=2, features=Features.parse(features))
        assert KERNEL.unsupported(problem, HOPPER) is None
        assert KERNEL.violations(KERNEL.default_config(problem, HOPPER), problem, HOPPER) == ()


@pytest.mark.parametrize(
    ("head_dim", "features", "changes", "reason"),
    [
        (64, "softcap", {"fold_lse": 1}, "`fold_lse` 0 .* under a soft cap"),
        (64, "varlen", {"persistent": 0}, "`persistent` 1 .* for varlen: tiles come from a counter"),
        (128, "deterministic", {"persistent": 0}, "`persistent` 1 .* for deterministic"),
        (128, "", {"block_n": 64}, "`block_n` 128 .* for head_dim up to 128, but got 64"),
        (200, "", {"block_n": 128}, "`block_n` 64 .* for head_dim up to 256, but got 128"),
        (192, "", {"named_barriers": 3}, "`named_barriers` 0 or 1 .* wider than 128, but got 3"),
        (256, "", {"num_stages": 3}, "shared memory"),
    ],
)
def test_what_goes_with_the_shape(head_dim: int, features: str, changes: dict[str, int], reason: str) -> None:
    problem = shape(head_dim, features=Features.parse(features))
    (told,) = KERNEL.violations(config(problem, **changes), problem, HOPPER)
    assert re.search(reason, told)


@pytest.mark.parametrize(
    ("name", "value"), [("block_m", 128), ("block_n", 32), ("num_stages", 1), ("fold_lse", 2), ("named_barriers", 4)]
)
def test_parameter_out_of_range(name: str, value: int) -> None:
    assert KERNEL.violations(config(shape(), **{name: value}), shape(), HOPPER) == (
        f"`{name}` of {KERNEL.name} must be one of {KERNEL.parameters[name]}, but got {value}.",
    )


def test_barriers_fit_beside_the_largest_tiles() -> None:
    """`shared_bytes` leaves out up to 1 KiB, which decides nothing: no config comes that near to what a block has."""
    for head_dim, stages in ((64, {2, 3, 4}), (128, {2, 3}), (192, {2, 3}), (256, {2})):
        space = SearchSpace.build(shape(head_dim), HOPPER, [KERNEL])
        assert {found.num_stages for found in space.feasible} == stages
        sizes = [KERNEL.shared_bytes(found, shape(head_dim), HOPPER) for found in space.feasible]
        assert max(sizes) + 1024 <= HOPPER.shared_per_block_optin_bytes


def test_it_stands_before_the_portable_backward_kernels() -> None:
    backward = [name for name, kernel in KERNELS.items() if kernel.direction is Direction.BACKWARD]
    assert backward[0] == KERNEL.name


# ---- tensors


def dense(layout: str = "bhsd", heads: int = 4, length: int = 256, dim: int = 64) -> torch.Tensor:
    if layout == "bhsd":
        return torch.empty(2, heads, length, dim, dtype=torch.float16)
    return torch.empty(2, length, heads, dim, dtype=torch.float16).transpose(1, 2)


def readable() -> dict[str, torch.Tensor]:
    packed = torch.empty(2, 256, 3 * 4 * 64, dtype=torch.float16)  # q, k and v of a fused projection
    return {
        "by head": dense(),
        "by position": dense("bshd"),
        "slice of a packed tensor": packed[..., 256:512].view(2, 256, 4, 64).transpose(1, 2),
        "padded rows": torch.empty(2, 4, 256, 72, dtype=torch.float16)[..., :64],
        "part of the length": dense(length=512)[:, :, :256],
        "batch within a position": torch.empty(256, 2, 4, 64, dtype=torch.float16).permute(1, 2, 0, 3),
        "one head of odd stride": torch.empty(2 * 256 * 64, dtype=torch.float16).as_strided(
            (2, 1, 256, 64), (256 * 64, 5, 64, 1)
        ),
    }


def unreadable() -> dict[str, torch.Tensor]:
    return {
        "repeated heads": dense(heads=1).expand(2, 4, 256, 64),
        "rows of 130 bytes": torch.empty(2, 4, 256, 65, dtype=torch.float16)[..., :64],
        "head_dim before length": torch.empty(2, 4, 64, 256, dtype=torch.float16).transpose(2, 3),
        "shifted by an element": torch.empty(dense().numel() + 8, dtype=torch.float16)[1:-7].view(dense().shape),
    }


@pytest.mark.parametrize("kind", readable())
def test_tensors_of_any_outer_strides(kind: str) -> None:
    tensor = readable()[kind]
    assert KERNEL.layout_problem(tensor, dense(), tensor) is None
    made = describe(tensor, 64)
    made.__post_init__()  # its own checks
    assert made.shape == list(tensor.shape)
    assert made.block_shape == [1, 1, 64, 64]
    kept = [stride for stride, size in zip(made.strides, tensor.shape, strict=True) if size > 1]
    assert kept == [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("kind", unreadable())
def test_other_tensors_are_left_to_others(kind: str, which: int) -> None:
    tensors = [dense(), dense("bshd"), dense()]
    tensors[which] = unreadable()[kind]
    assert not is_describable(tensors[which])
    name = ("query", "key", "value")[which]
    assert KERNEL.layout_problem(*tensors) == (
        f"rows of {name} must be contiguous, and 16 must divide its address and its strides in bytes, for {KERNEL.name}"
    )


# ---- machine code


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("triton")
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


def spills(head_dim: int, causal: Causal, group: int) -> int:
    """The most bytes that may spill, rounded up from what was seen; with Triton 3.6 hardly any of them in the loops."""
    if TRITON >= (3, 9):
        return 512
    most = {(64, False): 24, (64, True): 32, (128, False): 56, (128, True): 116}[head_dim, causal is not Causal.NONE]
    return most + 8 if group == 1 else most + 64


@compiled_here
@pytest.mark.few(1)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_default_config_compiles_to_what_it_is_meant_to_be(
    head_dim: int, causal: Causal, group: int, cache: Path
) -> None:
    problem = shape(head_dim, causal=causal, num_heads_kv=4 // group)
    best = KERNEL.default_config(problem, HOPPER)
    resources = compile_resources(KERNEL, best, problem, (9, 0))
    assert resources.tensor_cores == "wgmma"
    assert resources.registers == 168  # shared out again: 240 a thread that computes, 24 one that copies
    assert resources.num_warps == KERNEL.total_warps(best) == 12
    assert occupancy(resources, HOPPER).blocks_per_sm == 1
    assert resources.spill_bytes <= spills(head_dim, causal, group)
    assert 0 <= resources.shared_bytes - KERNEL.shared_bytes(best, problem, HOPPER) <= 1024
    loops = step_loops(machine_code(KERNEL, best, problem, cache))
    assert len(loops) >= 2
    for loop in loops:
        assert sum(wait > 0 for wait in waits(loop)) >= 2  # products run while others are waited for
        assert sum("HGMMA" in text for text in loop) >= 24  # five products


@compiled_here
@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (64, {"named_barriers": 1}),
        (64, {"persistent": 0, "num_stages": 4}),
        (128, {"named_barriers": 0}),
        (128, {"named_barriers": 2}),
        (128, {"persistent": 0, "num_stages": 3}),
    ],
    ids=str,
)
def test_other_configs_compile_and_take_what_is_predicted(head_dim: int, changes: dict[str, int], cache: Path) -> None:
    problem = shape(head_dim, causal=Causal.UPPER_LEFT)
    asked = config(problem, **changes)
    resources = compile_resources(KERNEL, asked, problem, (9, 0))
    assert resources.tensor_cores == "wgmma"
    assert 0 <= resources.shared_bytes - KERNEL.shared_bytes(asked, problem, HOPPER) <= 1024


def step_loops(code: list[tuple[int, str]]) -> list[list[str]]:
    """The loops of one step: as many exponentials as a thread has scores, and products."""
    bodies = ([text for _, text in loop] for loop in loops(code))
    return [
        body
        for body in bodies
        if sum("MUFU.EX2" in text for text in body) == 64 * 64 // 128 and any("HGMMA" in text for text in body)
    ]


def waits(loop: list[str]) -> list[int]:
    """Of every wait for products: how many may still run."""
    return [int(found[1], 16) for text in loop if (found := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", text))]
