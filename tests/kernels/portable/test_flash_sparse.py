"""Block-sparse attention against float64 autograd over the same mask: in Triton's interpreter, or compiled on a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.backward.sparse import FlashBackwardSparse
from blocktune.kernels.portable.forward.sparse import FlashForwardSparse
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.reference import visible
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tests.support.triton_modes import DEVICE, runs

pytestmark = [
    pytest.mark.interpreted,
    runs,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]
# Relative Frobenius error against float64, as for the dense kernels; gradients carry two more rounded operands.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-6}
GRADIENT_TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}
SPARSE = Features(mask=MaskKind.BLOCK_SPARSE)
FORWARD, BACKWARD = FlashForwardSparse(), FlashBackwardSparse()


def shape_of(**changes: Any) -> AttentionShape:
    base = {"batch": 1, "num_heads": 2, "num_heads_kv": 2, "seqlen_q": 96, "seqlen_k": 96, "head_dim": 16}
    base |= {"dtype": "float16", "features": SPARSE} | changes
    return AttentionShape(**({"head_dim_v": base["head_dim"]} | base))


def random_mask(
    shape: AttentionShape, density: float, block_q: int = 32, block_k: int = 32, batch: int = 1, heads: int = 1
) -> BlockMask:
    generator = torch.Generator().manual_seed(3)
    sizes = (batch, heads, -(-shape.seqlen_q // block_q), -(-shape.seqlen_k // block_k))
    return BlockMask(block_q, block_k, (torch.rand(sizes, generator=generator) < density).to(DEVICE))


@dataclass
class Problem:
    """Inputs of a shape, and what float64 says about them under a mask."""

    shape: AttentionShape
    mask: BlockMask
    layout: str = "bhsd"
    growth: float = 1.0

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(0)

        def draw(heads: int, rows: int, dim: int) -> torch.Tensor:
            sizes = (shape.batch, heads, rows, dim) if self.layout == "bhsd" else (shape.batch, rows, heads, dim)
            tensor = torch.randn(sizes, generator=generator).to(getattr(torch, shape.dtype)).to(DEVICE)
            return tensor if self.layout == "bhsd" else tensor.transpose(1, 2)

        self.q = draw(shape.num_heads, shape.seqlen_q, shape.head_dim)
        self.k = draw(shape.num_heads_kv, shape.seqlen_k, shape.head_dim)
        self.k = (self.k * torch.linspace(1, self.growth, shape.seqlen_k, device=DEVICE)[:, None]).to(self.k.dtype)
        self.v = draw(shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v)
        self.dout = draw(shape.num_heads, shape.seqlen_q, shape.head_dim_v)
        self.scale = shape.head_dim**-0.5

    def expected(self) -> tuple[torch.Tensor, ...]:
        """out, lse, dq, dk and dv in float64, by autograd."""
        shape = self.shape
        q, k, v = (tensor.double().detach().requires_grad_() for tensor in (self.q, self.k, self.v))
        wide_k, wide_v = (tensor.repeat_interleave(shape.group_size, 1) for tensor in (k, v))
        seen = self.mask.to_dense(shape.seqlen_q, shape.seqlen_k)
        seen = seen & visible(shape.seqlen_q, shape.seqlen_k, shape.causal, seen.device)
        scores = (q @ wide_k.transpose(-1, -2) * self.scale).masked_fill(~seen, float("-inf"))
        lse = torch.logsumexp(scores, -1)
        # a row without keys: exp(-inf - 0) is 0, and so are its gradients
        reference = lse.detach().masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)
        weights = torch.exp(scores - reference)
        out = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ wide_v
        gradients = torch.autograd.grad(out, (q, k, v), self.dout.double())
        return out.detach(), lse.detach(), *gradients

    def forward(self, config: KernelConfig) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.q.shape[:-1]
        out = torch.full((*sizes, self.shape.head_dim_v), float("nan"), dtype=self.q.dtype, device=DEVICE)
        lse = torch.full(sizes, float("nan"), dtype=torch.float32, device=DEVICE)
        FORWARD.bind(config, self.shape)(self.q, self.k, self.v, out, lse, self.scale, Extras(block_mask=self.mask))
        return out, lse

    def backward(self, config: KernelConfig) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv from the output and log-sum-exp that float64 gives."""
        out, lse, *_ = self.expected()
        gradients = tuple(torch.full_like(tensor, float("nan")) for tensor in (self.q, self.k, self.v))
        inputs = (self.q, self.k, self.v, out.to(self.q.dtype), lse.float().contiguous(), self.dout)
        shape = replace(self.shape, direction=Direction.BACKWARD)
        assert not BACKWARD.violations(config, shape, limits_for((9, 0)))
        BACKWARD.bind(config, shape)(*inputs, *gradients, self.scale, Extras(block_mask=self.mask))
        return gradients


def forward_config(
    block_m: int = 32, block_n: int = 16, warps: int = 4, stages: int = 2, schedule: int = 0
) -> KernelConfig:
    return KernelConfig(FORWARD.name, block_m, block_n, warps, stages, (("schedule", schedule),))


def backward_config(
    block_m: int = 32, block_n: int = 16, kv_block_m: int = 16, kv_block_n: int = 32, warps: int = 4, stages: int = 2
) -> KernelConfig:
    own = (("kv_block_m", kv_block_m), ("kv_block_n", kv_block_n))
    return KernelConfig(BACKWARD.name, block_m, block_n, warps, stages, own)


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert torch.isfinite(got).all()
    # a row that sees one key has a gradient of zero, up to the rounding of what cancels
    size = max(float(expected.norm()), 1e-3 * expected.numel() ** 0.5)
    assert (got.double() - expected).norm() <= tolerance * size


def check_forward(problem: Problem, config: KernelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    assert not FORWARD.violations(config, problem.shape, limits_for((9, 0)))
    out, lse = problem.forward(config)
    expected, expected_lse, *_ = problem.expected()
    assert_near(out, expected, TOLERANCE[problem.shape.dtype])
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    seen = ~expected_lse.isneginf()
    assert ((lse.double() - expected_lse)[seen].abs() <= 1e-4 * (1 + expected_lse[seen].abs())).all()
    return out, lse


def check_backward(problem: Problem, config: KernelConfig) -> tuple[torch.Tensor, ...]:
    gradients = problem.backward(config)
    for got, expected in zip(gradients, problem.expected()[2:], strict=True):
        assert_near(got, expected, GRADIENT_TOLERANCE[problem.shape.dtype])
    return gradients


@pytest.mark.few(8)
@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("density", [0.2, 0.6])
@pytest.mark.parametrize("causal", Causal)
def test_forward(density: float, schedule: int, causal: Causal) -> None:
    shape = shape_of(seqlen_q=96, seqlen_k=128, causal=causal)
    check_forward(Problem(shape, random_mask(shape, density)), forward_config(schedule=schedule))


@pytest.mark.few(6)
@pytest.mark.parametrize("schedule", [0, 2])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 77), (70, 33), (40, 100)])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
def test_forward_ragged(schedule: int, seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    shape = shape_of(num_heads=1, num_heads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    check_forward(Problem(shape, random_mask(shape, 0.7)), forward_config(schedule=schedule))


@pytest.mark.parametrize(
    ("block_q", "block_k", "block_m", "block_n"), [(64, 32, 16, 32), (16, 64, 16, 16), (32, 16, 32, 16)]
)
def test_forward_tiles_within_blocks(block_q: int, block_k: int, block_m: int, block_n: int) -> None:
    shape = shape_of(causal=Causal.UPPER_LEFT, dtype="float32")
    mask = random_mask(shape, 0.5, block_q, block_k)
    check_forward(Problem(shape, mask), forward_config(block_m, block_n))


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("per_batch", [False, True])
def test_forward_grouped_heads_with_their_own_masks(layout: str, per_batch: bool) -> None:
    shape = shape_of(batch=2, num_heads=4, num_heads_kv=2, seqlen_q=64, seqlen_k=65)
    mask = random_mask(shape, 0.5, batch=2 if per_batch else 1, heads=4)
    check_forward(Problem(shape, mask, layout), forward_config(schedule=2))


@pytest.mark.parametrize("causal", Causal)
def test_all_blocks_give_the_dense_kernel_s_bits(causal: Causal) -> None:
    shape = shape_of(seqlen_q=90, seqlen_k=110, causal=causal)
    problem = Problem(shape, random_mask(shape, 1.1, 64, 64))
    config = forward_config(64, 32)
    out, lse = problem.forward(config)
    dense_out, dense_lse = torch.empty_like(out), torch.empty_like(lse)
    dense = get_kernel("flash_fwd").bind(replace(config, kernel="flash_fwd"), replace(shape, features=Features()))
    dense(problem.q, problem.k, problem.v, dense_out, dense_lse, problem.scale)
    assert torch.equal(out, dense_out)
    assert torch.equal(lse, dense_lse)


def test_forward_of_rows_without_blocks() -> None:
    shape = shape_of()
    mask = random_mask(shape, 0.6)
    mask.mask[:, :, 1] = False
    out, lse = check_forward(Problem(shape, mask), forward_config(schedule=2))
    assert (out[:, :, 32:64] == 0).all()
    assert lse[:, :, 32:64].isneginf().all()


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_an_empty_mask_gives_zeros(schedule: int) -> None:
    shape = shape_of(causal=Causal.UPPER_LEFT, seqlen_k=90)
    out, lse = Problem(shape, random_mask(shape, 0.0)).forward(forward_config(schedule=schedule))
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_scores_that_grow_past_the_fixed_reference() -> None:
    shape = shape_of(seqlen_k=128)
    problem = Problem(shape, random_mask(shape, 0.7), growth=200.0)
    check_forward(problem, forward_config(schedule=2))


def test_tiles_must_divide_the_mask_s_blocks() -> None:
    shape = shape_of()
    problem = Problem(shape, random_mask(shape, 0.5))
    with pytest.raises(UsageError, match=r"`block_m` must divide the mask's blocks, but got block_m=64 for blocks of"):
        problem.forward(forward_config(block_m=64))
    with pytest.raises(UsageError, match=r"`block_n` must divide the mask's blocks, but got block_n=64"):
        problem.forward(forward_config(block_n=64))


def test_masks_of_another_shape_are_told() -> None:
    shape = shape_of()
    with pytest.raises(UsageError, match=r"has \(3, 3\) blocks, but got \(3, 4\)"):
        Problem(shape, random_mask(shape_of(seqlen_k=128), 0.5)).forward(forward_config())
    with pytest.raises(UsageError, match="heads=3"):
        Problem(shape, random_mask(shape, 0.5, heads=3)).forward(forward_config())
    launch = FORWARD.bind(forward_config(), shape)
    with pytest.raises(UsageError, match="must be a BlockMask, but got NoneType"):
        launch(*[torch.zeros(1, device=DEVICE)] * 5, 1.0, Extras())


def test_only_sparse_shapes_are_served() -> None:
    limits = limits_for((9, 0))
    assert FORWARD.unsupported(shape_of(), limits) is None
    assert "needs a block mask" in str(FORWARD.unsupported(shape_of(features=Features()), limits))
    assert "backward" in str(FORWARD.unsupported(shape_of(direction=Direction.BACKWARD), limits))


@pytest.mark.few(4)
@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("causal", Causal)
def test_backward(density: float, causal: Causal) -> None:
    shape = shape_of(seqlen_q=96, seqlen_k=128, causal=causal)
    check_backward(Problem(shape, random_mask(shape, density)), backward_config())


@pytest.mark.few(5)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 77), (70, 33), (40, 100)])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT, Causal.LOWER_RIGHT])
def test_backward_ragged(seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    shape = shape_of(num_heads=1, num_heads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    check_backward(Problem(shape, random_mask(shape, 0.8)), backward_config())


@pytest.mark.parametrize(
    ("blocks", "tiles"), [((64, 32), (16, 32, 64, 16)), ((16, 64), (16, 16, 16, 64)), ((32, 16), (32, 16, 32, 16))]
)
def test_backward_tiles_within_blocks(blocks: tuple[int, int], tiles: tuple[int, int, int, int]) -> None:
    shape = shape_of(causal=Causal.UPPER_LEFT, dtype="float32")
    check_backward(Problem(shape, random_mask(shape, 0.5, *blocks)), backward_config(*tiles))


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("per_batch", [False, True])
def test_backward_of_grouped_heads_with_their_own_masks(layout: str, per_batch: bool) -> None:
    shape = shape_of(batch=2, num_heads=4, num_heads_kv=2, seqlen_q=64, seqlen_k=65, head_dim_v=32)
    mask = random_mask(shape, 0.5, batch=2 if per_batch else 1, heads=4)
    check_backward(Problem(shape, mask, layout), backward_config())


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
def test_rows_and_columns_without_blocks_have_no_gradients(causal: Causal) -> None:
    shape = shape_of(causal=causal)
    mask = random_mask(shape, 0.9)
    mask.mask[:, :, 1] = False
    mask.mask[:, :, :, 2] = False
    dq, dk, dv = check_backward(Problem(shape, mask), backward_config())
    assert (dq[:, :, 32:64] == 0).all()
    assert (dk[:, :, 64:] == 0).all()
    assert (dv[:, :, 64:] == 0).all()


def test_a_gradient_of_one_value_for_all() -> None:
    """As of `out.sum()`: a tensor whose strides are all zero."""
    shape = shape_of()
    problem = Problem(shape, random_mask(shape, 0.5))
    problem.dout = torch.ones(1, 1, 1, 1, dtype=problem.q.dtype, device=DEVICE).expand(problem.dout.shape)
    check_backward(problem, backward_config())


def test_backward_tiles_must_divide_the_mask_s_blocks() -> None:
    shape = shape_of()
    problem = Problem(shape, random_mask(shape, 0.5))
    with pytest.raises(UsageError, match="`kv_block_m` must divide the mask's blocks, but got kv_block_m=64"):
        problem.backward(backward_config(kv_block_m=64))
    with pytest.raises(UsageError, match="`kv_block_n` must divide the mask's blocks, but got kv_block_n=64"):
        problem.backward(backward_config(kv_block_n=64))


def large(head_dim: int, dtype: str, causal: Causal, **changes: Any) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 2, "seqlen_q": 1024, "seqlen_k": 1100}
    return shape_of(**sizes | {"head_dim": head_dim, "dtype": dtype, "causal": causal} | changes)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("tile", [(64, 64, 4), (128, 64, 8), (64, 32, 4)])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (80, "bfloat16")])
def test_forward_compiled(head_dim: int, dtype: str, causal: Causal, tile: tuple[int, int, int], schedule: int) -> None:
    shape = large(head_dim, dtype, causal)
    mask = random_mask(shape, 0.3, max(tile), 128, batch=2, heads=8)
    mask.mask[:, 3, 2] = False
    check_forward(Problem(shape, mask, "bshd"), forward_config(*tile, 3, schedule))


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "tiles", "warps"), [(64, (64, 64, 64, 64), 8), (128, (128, 64, 64, 128), 8)])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (80, "bfloat16")])
def test_backward_compiled(
    head_dim: int, dtype: str, causal: Causal, block: int, tiles: tuple[int, int, int, int], warps: int
) -> None:
    shape = large(head_dim, dtype, causal)
    mask = random_mask(shape, 0.3, block, block, batch=2, heads=8)
    mask.mask[:, 3, 2] = False
    problem, config = Problem(shape, mask, "bshd"), backward_config(*tiles, warps)
    for first, second in zip(check_backward(problem, config), problem.backward(config), strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_default_configs_run(head_dim: int) -> None:
    limits = limits_for(torch.cuda.get_device_capability())
    shape = large(head_dim, "bfloat16", Causal.UPPER_LEFT)
    problem = Problem(shape, random_mask(shape, 0.5, 64, 64))
    check_forward(problem, FORWARD.default_config(shape, limits))
    check_backward(problem, BACKWARD.default_config(replace(shape, direction=Direction.BACKWARD), limits))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_time_follows_density(head_dim: int, record_property: Any) -> None:
    """A quarter of the blocks takes at most a third of the dense kernel's time, both with their best tiles here. The
    fastest dense kernel of all, which is another one, is only compared and told."""
    sizes = {"num_heads": 16, "num_heads_kv": 16, "seqlen_q": 8192, "seqlen_k": 8192}
    shape = large(head_dim, "bfloat16", Causal.NONE, **sizes)
    problem = Problem(shape, random_mask(shape, 0.25, 128, 128))
    out = torch.empty_like(problem.q)
    tensors = (problem.q, problem.k, problem.v, out, None, problem.scale)
    dense_kernel, dense_shape = get_kernel("flash_fwd"), replace(shape, features=Features())
    dense = dense_kernel.bind(dense_kernel.default_config(dense_shape, limits_for((9, 0))), dense_shape)
    configs = [forward_config(*tile, schedule=2) for tile in ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3))]
    extras = Extras(block_mask=problem.mask)
    sparse = min(milliseconds(FORWARD.bind(config, shape), *tensors, extras) for config in configs)
    ratio = milliseconds(dense, *tensors) / sparse
    record_property("speed_up_at_density", f"{ratio:.2f} at {problem.mask.density:.3f}")
    fastest = kernels_for(dense_shape, current_device().limits)[0]
    best = milliseconds(fastest.bind(fastest.default_config(dense_shape, limits_for((9, 0))), dense_shape), *tensors)
    print(f"d{head_dim}: {ratio:.2f} x flash_fwd, {best / sparse:.2f} x {fastest.name}")
    assert ratio >= 3 * 0.25 / problem.mask.density


def milliseconds(launch: Any, *arguments: Any) -> float:
    """The median of 20 launches' times."""
    times = []
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch(*arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[10]
