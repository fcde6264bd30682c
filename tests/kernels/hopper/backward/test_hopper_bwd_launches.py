"""The launches of the Hopper backward, recorded without a GPU: what is compiled ahead is what is launched."""

from typing import Any

import pytest
import torch

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hopper.backward import launch as hopper_bwd_launch
from blocktune.kernels.hopper.sparse.kernel import FlashBackwardHopperSparse
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.kernels.hopper.backward.test_flash_bwd_hopper import FEATURES, HOPPER, KERNEL, MASKS, config, shape
from tests.support.attention.sparse_problems import random_mask
from tests.support.triton_modes import compiled_here

SPARSE = FlashBackwardHopperSparse()


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
JOINED_NAMES = (*NAMES, "join_parts_kernel")
WIDE_NAMES = ("prepare_rows_kernel", "flash_bwd_hopper_wide_kernel", "finish_rows_kernel")


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    made = {name: Recorder(getattr(hopper_bwd_launch, name)) for name in {*JOINED_NAMES, *GENERAL_NAMES, *WIDE_NAMES}}
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
    blocks = random_mask(problem, 0.5, 128, 128) if problem.features.mask is MaskKind.BLOCK_SPARSE else None
    softcap = 20.0 * problem.features.softcap
    return Extras(softcap=softcap, cu_seqlens_q=begins, cu_seqlens_k=begins, block_mask=blocks)


def assert_compiled_ahead_as_launched(
    problem: AttentionShape, names: tuple[str, ...], recorders: dict[str, Recorder], monkeypatch: Any
) -> None:
    kernel = SPARSE if problem.features.mask is MaskKind.BLOCK_SPARSE else KERNEL
    best = kernel.default_config(problem, HOPPER)
    kernel.bind(best, problem)(*empty_tensors(problem), 0.1, extras_of(problem))
    launched = {name: recorders[name].specialized() for name in names}
    for name, recorder in recorders.items():
        monkeypatch.setattr(hopper_bwd_launch, name, recorder.function)
    before, *after = kernel.further_specs(best, problem)
    specs: dict[str, CompileSpec] = dict(zip(names, (before, kernel.compile_spec(best, problem), *after), strict=True))
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
    names = NAMES if heads[0] == heads[1] else JOINED_NAMES
    assert_compiled_ahead_as_launched(problem, names, recorders, monkeypatch)


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


@compiled_here
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("features", ["block_sparse", "block_sparse deterministic"])
def test_what_is_compiled_ahead_for_block_masks_is_what_is_launched(
    head_dim: int, features: str, recorders: dict[str, Recorder], monkeypatch: Any
) -> None:
    problem = shape(head_dim, 384, Causal.LOWER_RIGHT, seqlen_k=432, features=Features.parse(features))
    assert_compiled_ahead_as_launched(problem, GENERAL_NAMES, recorders, monkeypatch)


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
    assert turns.numel() == 2 * 4 * 3
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
