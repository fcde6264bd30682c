"""Every kernel's bytes: all are counted, grow as the theorems say, and stay between the two bounds."""

from dataclasses import replace
from typing import Literal

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.portable.decode.kernel import FlashDecode
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.traffic.backward import fused_backward_traffic, split_backward_traffic, standard_backward_traffic
from blocktune.tuner.traffic.by_kernel import traffic_of
from blocktune.tuner.traffic.decode import decode_traffic
from blocktune.tuner.traffic.forward import general_traffic, transposed_traffic
from blocktune.tuner.traffic.launches import Passes
from blocktune.tuner.traffic.model import Traffic, v1_traffic, v2_traffic
from blocktune.tuner.traffic.sparse import (
    Blocks,
    fused_sparse_backward_traffic,
    random_blocks,
    sparse_backward_traffic,
    sparse_forward_traffic,
)

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")
MIB = 1 << 20


def shape(seqlen: int = 8192, head_dim: int = 64, mask: MaskKind = MaskKind.NONE) -> AttentionShape:
    """One head of bfloat16."""
    return replace(complete_shape(seqlen, head_dim, batch=1, heads=1), features=Features(mask=mask))


def growth(more: Traffic, less: Traffic) -> float:
    return more.total_bytes / less.total_bytes


def some_shape(kernel: str) -> AttentionShape:
    """One that the kernel computes on Hopper."""
    plain = complete_shape(1024, 64, batch=2, heads=8, kv_heads=2)
    sparse_backward = replace(plain, direction=Direction.BACKWARD, features=Features(mask=MaskKind.BLOCK_SPARSE))
    shapes = {
        "flash_fwd_general": replace(plain, features=Features(window=(127, 0))),
        "flash_fwd_hopper": replace(plain, features=Features(mask=MaskKind.BOOLEAN)),
        "flash_fwd_fp8": complete_shape(
            8192, 64, batch=1, heads=8, kv_heads=2
        ),  # many queries a key: values get a pass
        "flash_fwd_sparse": replace(plain, features=Features(mask=MaskKind.BLOCK_SPARSE)),
        "flash_bwd_hopper": replace(plain, direction=Direction.BACKWARD, features=Features(mask=MaskKind.BOOLEAN)),
        **dict.fromkeys(("flash_bwd_sparse", "flash_bwd_hopper_sparse"), sparse_backward),
        "flash_decode": replace(plain, seqlen_q=1),
        "flash_decode_hopper": replace(plain, seqlen_q=1),
        "flash_decode8": replace(plain, seqlen_q=1, features=Features.parse("cached kv=e4m3")),
        "flash_decode8_hopper": replace(plain, seqlen_q=1, features=Features.parse("cached kv=e4m3")),
        "flash_decode8_ring": replace(
            plain, seqlen_q=1, head_dim=128, head_dim_v=128, features=Features.parse("cached kv=e4m3")
        ),
    }
    direction = KERNELS[kernel].direction
    return shapes.get(kernel, replace(plain, direction=direction))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_counted_between_its_bounds(kernel: str) -> None:
    problem = some_shape(kernel)
    config = KERNELS[kernel].default_config(problem, H200.limits)
    counted, once = (traffic_of(KERNELS[kernel], config, problem, perfect_l2=perfect) for perfect in (False, True))
    assert counted.total_bytes >= once.total_bytes
    # no kernel writes less than its results, or reads less than its inputs unless a mask hides some
    outputs = problem.batch * problem.num_heads * problem.seqlen_q * problem.head_dim_v * 2
    results = 1024 * 64 * 2 * (8 + 4) * 2 if problem.direction is Direction.BACKWARD else outputs
    assert once.written_bytes >= results
    assert once.read_bytes >= problem.batch * problem.num_heads * problem.seqlen_q * problem.head_dim * 2
    assert once.to_json()["total_bytes"] == once.total_bytes


@pytest.mark.parametrize("kernel", KERNELS)
def test_launches_that_only_move_bytes_are_among_those_that_are_counted(kernel: str) -> None:
    problem, names = some_shape(kernel), KERNELS[kernel].loops.moving_passes
    found = traffic_of(KERNELS[kernel], KERNELS[kernel].default_config(problem, H200.limits), problem)
    counted = [one.name for one in found.passes] if isinstance(found, Passes) else []
    assert [name for name in counted if name in names] == list(names)
    assert len(counted) == 0 or len(counted) > len(names)


def test_one_kernel_under_a_block_mask_follows_the_density() -> None:
    """With every block it moves what the dense one does; the sums of dq that are added to follow the density, too."""
    problem = shape(4096, mask=MaskKind.BLOCK_SPARSE)

    def moved(density: float, parts: int = 1) -> Passes:
        blocks = random_blocks(problem, density=density)
        return fused_sparse_backward_traffic(problem, 64, 128, blocks=blocks, own_lse=True, parts=parts)

    whole, quarter = moved(1.0), moved(0.25)
    assert whole == fused_backward_traffic(replace(problem, features=Features()), 64, 128, own_lse=True)
    assert quarter["dk_dv"].read["q"] * 4 == whole["dk_dv"].read["q"]
    assert quarter["dk_dv"].added["sums"] * 4 == whole["dk_dv"].added["sums"]
    assert quarter["dq"] == whole["dq"]


@pytest.mark.parametrize(("tensor", "moved"), [("k", 64), ("v", 128)])
def test_a_transposed_tensor_moves_twice_before_it_is_read(tensor: Literal["k", "v"], moved: int) -> None:
    """With a window, too, whose keys outside of all sight are transposed all the same."""
    problem = replace(shape(1024), head_dim_v=128, features=Features(window=(127, 0)))
    alone = general_traffic(problem, 64, 64)
    found = transposed_traffic(problem, alone, tensor)
    assert found["transpose"].to_json()["total_bytes"] == 2 * 1024 * moved * 2
    assert found["forward"].read[f"{tensor}t"] == alone["forward"].read[tensor]
    assert found.total_bytes == alone.total_bytes + 2 * 1024 * moved * 2


@pytest.mark.parametrize(("mask", "bits", "element"), [(MaskKind.BOOLEAN, 8, 1), (MaskKind.ADDITIVE, 1, 2)])
@pytest.mark.parametrize("direction", Direction)
def test_a_mask_is_read_and_laid_out_before_the_heads_read_it(
    direction: Direction, mask: MaskKind, bits: int, element: int
) -> None:
    kernel = KERNELS["flash_fwd_hopper" if direction is Direction.FORWARD else "flash_bwd_hopper"]
    plain = replace(complete_shape(1024, 64, batch=2, heads=8), direction=direction)
    masked = replace(plain, features=Features(mask=mask))
    config = kernel.default_config(masked, H200.limits)
    found, without = (traffic_of(kernel, config, problem) for problem in (masked, plain))
    whole = 1024 * 1024 * element
    assert found["mask"].to_json()["total_bytes"] == whole + whole // bits
    assert found["forward" if direction is Direction.FORWARD else "dk_dv"].read["laid"] == 2 * 8 * whole // bits
    assert found.total_bytes - without.total_bytes == whole + whole // bits + 2 * 8 * whole // bits


# ---- Theorem 5: Θ(Nd + N²) against Θ(N²d²/M), with tiles of M/4d rows


def paper_backward(seqlen: int, head_dim: int, memory_elements: int) -> dict[str, Passes]:
    rows = memory_elements // (4 * head_dim)
    problem = shape(seqlen, head_dim)
    return {
        "fused": fused_backward_traffic(problem, min(rows, head_dim), rows),
        "split": split_backward_traffic(problem, keys=(64, rows), queries=(rows, 64)),
    }


@pytest.mark.parametrize("variant", ["fused", "split"])
def test_the_backward_grows_with_n_squared_d_squared_over_m(variant: str) -> None:
    base = paper_backward(32768, 64, 32768)[variant]
    assert growth(paper_backward(65536, 64, 32768)[variant], base) == pytest.approx(4, rel=0.03)
    assert growth(paper_backward(32768, 128, 32768)[variant], base) == pytest.approx(4, rel=0.05)
    assert growth(base, paper_backward(32768, 64, 65536)[variant]) == pytest.approx(2, rel=0.05)


def test_the_standard_backward_moves_seven_score_matrices() -> None:
    found = standard_backward_traffic(shape(4096))
    assert found.total_bytes == 7 * 64 * MIB + 4096 * 64 * 2 * (2 + 2 + 2 + 2)
    assert growth(standard_backward_traffic(shape(32768)), standard_backward_traffic(shape(16384))) == pytest.approx(
        4, rel=0.01
    )
    assert found["dp"].written == {"dp": 64 * MIB}


def test_one_kernel_saves_the_second_walk_and_pays_for_sums() -> None:
    """At equal tiles of 128 rows: q and dout once a key tile in both; then keys once a query tile, against sums that
    are read and written once a key tile."""
    fused = fused_backward_traffic(shape(), 64, 128)
    split = split_backward_traffic(shape(), keys=(64, 128), queries=(128, 64))
    rows = 8192 * 8192 // 128
    assert fused["dk_dv"].added == {"sums": rows * 64 * 4}
    assert fused.read_bytes - fused.arriving_bytes == rows * 64 * 4, "an addend leaves the SM, and nothing comes back"
    assert split.read_bytes == split.arriving_bytes
    assert split["dq"].read["k"] == split["dq"].read["v"] == rows * 64 * 2
    assert fused.total_bytes > split.total_bytes


def test_block_sparse_traffic_follows_the_density() -> None:
    problem = shape(16384, mask=MaskKind.BLOCK_SPARSE)

    def moved(density: float) -> tuple[Passes, Passes]:
        blocks = random_blocks(problem, density=density)
        forward = sparse_forward_traffic(problem, 64, 64, blocks)
        return forward, sparse_backward_traffic(problem, keys=(64, 64), queries=(64, 64), blocks=blocks)

    (whole, whole_back), (quarter, quarter_back) = moved(1.0), moved(0.25)
    dense = v2_traffic(replace(problem, features=Features()), 64, 64)
    assert whole.total_bytes == dense.total_bytes
    assert quarter.passes[0].read["k"] * 4 == whole.passes[0].read["k"]
    assert quarter_back["dk_dv"].read["q"] * 4 == whole_back["dk_dv"].read["q"]
    assert growth(whole, quarter) == pytest.approx(4, rel=0.05)
    assert growth(whole_back, quarter_back) == pytest.approx(4, rel=0.1)
    split = split_backward_traffic(replace(problem, features=Features()), keys=(64, 64), queries=(64, 64))
    assert whole_back.total_bytes == split.total_bytes


def test_a_mask_s_own_blocks_are_counted() -> None:
    problem = replace(shape(1024, mask=MaskKind.BLOCK_SPARSE), num_heads=2, num_heads_kv=2)
    diagonal = BlockMask.from_predicate(
        lambda row, column: row == column, seqlen_q=1024, seqlen_k=1024, block_q=128, block_k=128
    )
    blocks = Blocks.of(diagonal)
    assert blocks.density == diagonal.density == 1 / 8
    moved = sparse_forward_traffic(problem, 64, 64, blocks)
    assert moved.passes[0].read["k"] == 2 * (1024 // 64) * 128 * 64 * 2
    assert sparse_forward_traffic(problem, 64, 64, blocks, perfect_l2=True).passes[0].read["k"] == 2 * 1024 * 64 * 2


def test_a_window_makes_traffic_linear_and_a_mask_tensor_makes_it_quadratic() -> None:
    window = Features(window=(1023, 0))
    narrow, longer = (general_traffic(replace(shape(n), features=window), 128, 64) for n in (8192, 16384))
    assert growth(longer, narrow) == pytest.approx(2, rel=0.1)
    plain = general_traffic(shape(), 128, 64)
    masked = general_traffic(shape(mask=MaskKind.BOOLEAN), 128, 64)
    assert plain.total_bytes == v2_traffic(shape(), 128, 64).total_bytes
    assert masked.total_bytes - plain.total_bytes == 8192 * 8192
    for cheap in ("softcap", "alibi", "dropout"):
        assert general_traffic(replace(shape(), features=Features(**{cheap: True})), 128, 64) == plain


def decoding(heads_kv: int = 8, **sizes: int) -> AttentionShape:
    return replace(complete_shape(8192, 128, batch=1, heads=32, kv_heads=heads_kv), seqlen_q=1, **sizes)


def with_splits(splits: int, block_m: int = 16) -> KernelConfig:
    return KernelConfig("flash_decode", block_m, 64, 4, 3, (("overlap", 1), ("splits", splits)))


def test_a_group_reads_its_keys_once_and_splits_cost_their_partial_results() -> None:
    keys = 8 * 8192 * 128 * 2
    for splits in (1, 16, 64):
        found = decode_traffic(decoding(), with_splits(splits))
        assert found["split"].read["k"] == found["split"].read["v"] == keys
    partial = decode_traffic(decoding(), with_splits(64))["merge"]
    assert partial.read["partial"] == 64 * 32 * 128 * 4
    assert [one.name for one in decode_traffic(decoding(), with_splits(1)).passes] == ["split"]
    # 32 rows of one key head in tiles of 16 read it twice, unless L2 keeps it
    multi_query = decoding(heads_kv=1)
    assert decode_traffic(multi_query, with_splits(4))["split"].read["k"] == 2 * keys // 8
    assert decode_traffic(multi_query, with_splits(4), perfect_l2=True)["split"].read["k"] == keys // 8
    assert v2_traffic(decoding(), 16, 64).k_read == 4 * keys, "without packing every query head reads them"


def test_a_paged_cache_moves_what_a_contiguous_one_does() -> None:
    paged = replace(decoding(), features=Features(cached=True, page_size=64))
    config = FlashDecode().default_config(paged, H200.limits)
    assert decode_traffic(paged, config) == decode_traffic(replace(decoding(), features=Features(cached=True)), config)


def test_a_causal_backward_moves_about_half() -> None:
    whole = fused_backward_traffic(shape(), 64, 128)
    half = fused_backward_traffic(replace(shape(), causal=Causal.UPPER_LEFT), 64, 128)
    tiles = 8192 // 128
    assert half["dk_dv"].read["q"] / whole["dk_dv"].read["q"] == (tiles + 1) / (2 * tiles)


def test_v1_s_kernel_turns_its_output_into_16_bits() -> None:
    found = traffic_of(KERNELS["flash_v1"], KernelConfig("flash_v1", 64, 64, 4, 1), shape())
    assert found.total_bytes - v1_traffic(shape(), 64, 64).total_bytes == 8192 * 64 * (4 + 2)


def test_parts_of_a_group_read_their_keys_each_and_leave_float32_gradients() -> None:
    kernel = KERNELS["flash_bwd_hopper"]
    problem = complete_shape(4096, 128, batch=1, heads=16, kv_heads=2)
    problem = replace(problem, direction=Direction.BACKWARD, causal=Causal.LOWER_RIGHT)
    parameters = kernel.default_config(problem, H200.limits).parameters

    def by(parts: int, *, perfect_l2: bool = False) -> Passes:
        config = KernelConfig.of(kernel.name, parameters | {"group_parts": parts})
        found = traffic_of(kernel, config, problem, perfect_l2=perfect_l2)
        assert isinstance(found, Passes)
        return found

    whole, divided, keys = by(1), by(4), 2 * 4096 * 128
    assert [one.name for one in whole.passes] == ["delta", "dk_dv", "dq"]
    assert [one.name for one in divided.passes] == ["delta", "dk_dv", "dq", "join"]
    assert whole["dk_dv"].read["k"] == by(4, perfect_l2=True)["dk_dv"].read["k"] == keys * 2
    assert divided["dk_dv"].read["k"] == 4 * keys * 2
    assert divided["dk_dv"].read["q"] == whole["dk_dv"].read["q"]
    assert divided["dk_dv"].written == divided["join"].read == {"dk": 4 * keys * 4, "dv": 4 * keys * 4}
    assert divided["join"].written == whole["dk_dv"].written
    assert divided["dk_dv"].added == whole["dk_dv"].added
