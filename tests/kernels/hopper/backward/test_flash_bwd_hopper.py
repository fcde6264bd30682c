"""The Hopper backward: its rules, its launches, and its machine code compiled without a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.hopper.backward import launch as hopper_bwd_launch
from blocktune.kernels.hopper.backward.kernel import FlashBackwardHopper
from blocktune.kernels.hopper.common.descriptors import describe, is_describable
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.compile.compiler import compile_resources
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.search.space import SearchSpace
from tests.support.machine_code import loops, machine_code
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
        (shape(features=Features(alibi=True, dropout=True, window=(127, 0))), "does not know alibi, dropout"),
        (shape(features=Features(mask=MaskKind.BOOLEAN)), "does not know boolean"),
        (shape(dtype="float32"), "computes float16 and bfloat16, but got float32"),
        (shape(32), r"`40 <= head_dim <= 256`, in steps of 8, must hold .* head_dim=32"),
        (shape(264), r"`40 <= head_dim <= 256`, in steps of 8, must hold .* head_dim=264"),
        (shape(128, head_dim_v=100), r"`40 <= head_dim_v <= 256`, in steps of 8, must hold .* head_dim_v=100"),
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
        (128, "", {"block_n": 64}, "`block_n` 128 .* for heads of 128 columns, but got 64"),
        (200, "", {"block_n": 128}, "`block_n` 64 .* for heads of 256 columns, but got 128"),
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


# ---- launches without a GPU


class Recorder:
    """Stands for a jitted function and keeps what it is launched with."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.grids: list[tuple[int, ...]] = []
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **keywords: self.calls.append((arguments, keywords))

    def named(self) -> list[dict[str, Any]]:
        """The arguments of every launch by name."""
        return [dict(zip(self.function.arg_names, arguments, strict=True)) for arguments, _ in self.calls]

    def specialized(self) -> tuple[Any, Any, Any]:
        """Signature, constants and attributes of the one launch, by the JIT's own steps."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        ((arguments, keywords),) = self.calls
        backend = make_backend(GPUTarget("cuda", 90, 32))
        bind = create_function_from_signature(self.function.signature, self.function.params, backend)
        asked = keywords | {"enable_fp_fusion": True}
        bound, specialization, _ = bind(*arguments, **asked)
        options = {name: value for name, value in asked.items() if name in ("num_warps", "enable_fp_fusion")}
        return tuple(self.function._pack_args(backend, options, bound, specialization, None)[1:])


NAMES = ("prepare_kernel", "flash_bwd_hopper_kernel", "finish_kernel")
GENERAL_NAMES = ("prepare_rows_kernel", "flash_bwd_hopper_kernel", "finish_rows_kernel")
WIDE_NAMES = ("prepare_rows_kernel", "flash_bwd_hopper_wide_kernel", "finish_rows_kernel")


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    made = {name: Recorder(getattr(hopper_bwd_launch, name)) for name in {*NAMES, *GENERAL_NAMES, *WIDE_NAMES}}
    for name, recorder in made.items():
        monkeypatch.setattr(hopper_bwd_launch, name, recorder)
    monkeypatch.setattr(hopper_bwd_launch.BackwardLaunch, "_grid", lambda launch, device: (1,))
    return made


def empty_tensors(problem: AttentionShape) -> list[torch.Tensor]:
    """q, k, v, out, lse, dout, dq, dk and dv; of packed sequences each as long as the longest."""
    dtype, packed = getattr(torch, problem.dtype), problem.features.varlen
    batch, factor = (1, problem.batch) if packed else (problem.batch, 1)
    queries, keys = (problem.num_heads, problem.seqlen_q * factor), (problem.num_heads_kv, problem.seqlen_k * factor)
    q, dq = (torch.empty(batch, *queries, problem.head_dim, dtype=dtype) for _ in range(2))
    out, dout = (torch.empty(batch, *queries, problem.head_dim_v, dtype=dtype) for _ in range(2))
    k, dk = (torch.empty(batch, *keys, problem.head_dim, dtype=dtype) for _ in range(2))
    v, dv = (torch.empty(batch, *keys, problem.head_dim_v, dtype=dtype) for _ in range(2))
    lse = torch.empty(q.shape[1:-1] if packed else q.shape[:-1])
    return [q, k, v, out, lse, dout, dq, dk, dv]


def extras_of(problem: AttentionShape) -> Extras:
    begins = torch.zeros(problem.batch + 1, dtype=torch.int32) if problem.features.varlen else None
    return Extras(softcap=20.0 * problem.features.softcap, cu_seqlens_q=begins, cu_seqlens_k=begins)


def assert_compiled_ahead_as_launched(
    problem: AttentionShape, names: tuple[str, str, str], recorders: dict[str, Recorder], monkeypatch: Any
) -> None:
    best = KERNEL.default_config(problem, HOPPER)
    KERNEL.bind(best, problem)(*empty_tensors(problem), 0.1, extras_of(problem))
    launched = {name: recorders[name].specialized() for name in names}
    for name, recorder in recorders.items():
        monkeypatch.setattr(hopper_bwd_launch, name, recorder.function)
    before, after = KERNEL.further_specs(best, problem)
    specs: dict[str, CompileSpec] = dict(zip(names, (before, KERNEL.compile_spec(best, problem), after), strict=True))
    for name, spec in specs.items():
        assert (spec.signature, spec.constexprs, spec.attrs) == launched[name]


@compiled_here
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (1, 1)], ids=str)
def test_what_is_compiled_ahead_is_what_is_launched(
    head_dim: int, causal: Causal, heads: tuple[int, int], recorders: dict[str, Recorder], monkeypatch: Any
) -> None:
    problem = shape(head_dim, 384, causal, num_heads=heads[0], num_heads_kv=heads[1], batch=1, dtype="float16")
    assert_compiled_ahead_as_launched(problem, NAMES, recorders, monkeypatch)


@compiled_here
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("features", FEATURES)
def test_what_is_compiled_ahead_for_general_shapes_is_what_is_launched(
    head_dim: int, features: str, recorders: dict[str, Recorder], monkeypatch: Any
) -> None:
    problem = shape(head_dim, 384, Causal.LOWER_RIGHT, seqlen_k=432, features=Features.parse(features))
    names = WIDE_NAMES if head_dim > 128 else GENERAL_NAMES
    assert_compiled_ahead_as_launched(problem, names, recorders, monkeypatch)


def test_general_launches_have_room_for_every_row(recorders: dict[str, Recorder]) -> None:
    problem = shape(128, 1, seqlen_q=130, seqlen_k=70, features=Features(deterministic=True))
    KERNEL.bind(config(problem), problem)(*empty_tensors(problem), 0.125)
    before, after = (recorders[name].named()[0] for name in ("prepare_rows_kernel", "finish_rows_kernel"))
    lse_log2, delta, sums, counter, turns = (
        before[name] for name in ("lse_log2", "delta", "dq_sums", "counter", "turns")
    )
    assert lse_log2.numel() == delta.numel() == 2 * 4 * 192
    assert sums.numel() == 2 * 4 * 192 * 128
    assert counter.numel() == 1
    assert turns.numel() == 2 * 4 * 3 * 2
    assert after["dq_sums"] is sums
    assert recorders["prepare_rows_kernel"].grids == [(2 * 4 * 192 // 32, 1, 1)]
    assert recorders["finish_rows_kernel"].grids == [(2 * 4 * 3 * 2, 1, 1)]


def test_packed_descriptors_cancel_in_64_bits() -> None:
    """Row 3 of the sequence that begins at 100 and is 7 long lies where it would without the two more dimensions."""
    problem = shape(64, features=Features(varlen=True))
    tensor = torch.empty(1, 500, 4, 64, dtype=torch.float16).transpose(1, 2)
    made = hopper_bwd_launch._described(64, problem, tensor)
    made.__post_init__()  # its own checks
    begin, length, row, head, column = 100, 7, 3, 2, 8
    coordinates = (1 << 30, begin + length, head, (1 << 30) - length + row, column)
    place = sum(2 * stride * at for stride, at in zip(made.strides, coordinates, strict=True)) % (1 << 64)
    assert place == 2 * (tensor.stride(2) * (begin + row) + tensor.stride(1) * head + column)
    assert coordinates[3] < made.shape[3] <= coordinates[3] + length - row
    assert made.block_shape == [1, 1, 1, 64, 64]


def test_every_launch_counts_its_own_tiles(recorders: dict[str, Recorder]) -> None:
    problem = shape(64, 256, Causal.UPPER_LEFT)
    launch, tensors = KERNEL.bind(config(problem), problem), empty_tensors(problem)
    for _ in range(2):
        launch(*tensors, 0.125)
    counters = [named["counter"] for named in recorders["flash_bwd_hopper_kernel"].named()]
    prepared = [named["counter"] for named in recorders["prepare_kernel"].named()]
    assert counters[0].data_ptr() != counters[1].data_ptr()
    assert [counter.data_ptr() for counter in prepared] == [counter.data_ptr() for counter in counters]
    assert recorders["prepare_kernel"].grids[0] == (2 * 4 * 256 // 32, 1, 1)
    assert recorders["finish_kernel"].grids[0] == (2 * 4 * 256 // 64 * 2, 1, 1)


@pytest.mark.parametrize(("scale", "taken"), [(0.25, 0.25), (-0.5, -0.5), (0.0, 1e-30), (-0.0, 1e-30)])
def test_the_scale_that_lse_is_divided_by_is_never_zero(
    scale: float, taken: float, recorders: dict[str, Recorder]
) -> None:
    KERNEL.bind(config(shape()), shape())(*empty_tensors(shape()), scale)
    named = recorders["flash_bwd_hopper_kernel"].named()[0]
    assert named["scale"] == scale
    assert named["scale_log2"] == pytest.approx(taken * 1.4426950408889634)


def test_repeated_dout_is_copied_and_a_strange_gradient_refused(recorders: dict[str, Recorder]) -> None:
    problem = shape(64, 256)
    q, k, v, out, lse, dout, dq, dk, dv = empty_tensors(problem)
    launch = KERNEL.bind(config(problem), problem)
    launch(q, k, v, out, lse, dout[:, :1, :1, :1].expand(dout.shape), dq, dk, dv, 0.125)
    named = recorders["prepare_kernel"].named()[0]
    assert named["dout"].is_contiguous()
    with pytest.raises(UsageError, match=r"Rows of a gradient .* strides \(65536, 16384, 1, 256\) .* torch.empty_like"):
        launch(q, k, v, out, lse, dout, dq, dk.transpose(2, 3).contiguous().transpose(2, 3), dv, 0.125)


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
    most = {(64, False): 24, (64, True): 28, (128, False): 56, (128, True): 116}[head_dim, causal is not Causal.NONE]
    return most + 8 if group == 1 else most + 64


@compiled_here
@pytest.mark.few(3)
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
@pytest.mark.few(2)
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
