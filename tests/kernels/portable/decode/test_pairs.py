"""Two splits of which the later program merges, against float64, and to the bit whichever of them it is."""

import pytest
import torch

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import Causal
from tests.kernels.portable.decode.test_flash_decode import (
    CAN_OVERLAP,
    KERNEL,
    TOLERANCE,
    case_of,
    check,
    config_of,
    expected,
    paged,
    run,
    shape_of,
)
from tests.support.triton_modes import runs

# Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
CALLS = 200


def pair_of(**changes: int) -> KernelConfig:
    return config_of(**{"splits": 2, "overlap": 2} | changes)


@runs
@pytest.mark.parametrize("sizes", [{}, {"seqlen_k": 20}, {"num_heads": 7, "num_heads_kv": 1}, {"head_dim_v": 24}])
def test_both_shares_are_in_the_output(sizes: dict[str, int]) -> None:
    check(pair_of(), case_of(shape_of(**sizes)))


@runs
@pytest.mark.parametrize("features", [Features(window=(40, 0)), Features(softcap=True), Features(cached=True)])
def test_with_features(features: Features) -> None:
    extras = {"softcap": 2.0} if features.softcap else {}
    lengths = (90, 0) if features.cached else None
    check(pair_of(), case_of(shape_of(features, causal=Causal.LOWER_RIGHT, seqlen_q=3), lengths, **extras))


@runs
def test_over_pages() -> None:
    case = case_of(shape_of(Features(cached=True, page_size=16)), (90, 33))
    check(pair_of(), paged(case), case)


@runs
def test_over_more_rows_than_a_tile() -> None:
    check(pair_of(), case_of(shape_of(seqlen_q=11, num_heads=4, num_heads_kv=1)))


on_hopper = pytest.mark.skipif(not CAN_OVERLAP, reason="pairs need a GPU of compute capability 9.0")


@pytest.mark.gpu
@runs
@on_hopper
def test_equal_to_the_bit_in_every_call() -> None:
    """Which program merges changes from call to call."""
    sizes = {"num_heads": 32, "num_heads_kv": 8, "head_dim": 128, "seqlen_k": 4000, "seqlen_q": 8, "batch": 8}
    case = case_of(shape_of(**sizes, dtype="bfloat16"))
    first = run(pair_of(block_m=32, block_n=64), case)
    for _ in range(CALLS):
        for one, other in zip(run(pair_of(block_m=32, block_n=64), case), first, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@runs
@on_hopper
def test_in_a_graph_beside_its_stream() -> None:
    case = case_of(shape_of(head_dim=64, seqlen_k=2000, dtype="bfloat16"))
    outs = [torch.full_like(case.q, float("nan")) for _ in range(2)]
    launch = KERNEL.bind(pair_of(), case.shape)
    launch(case.q, case.k, case.v, outs[0], None, 0.125)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        launch(case.q, case.k, case.v, outs[1], None, 0.125)
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(CALLS):
        with torch.cuda.stream(other):
            graph.replay()
        launch(case.q, case.k, case.v, outs[0], None, 0.125)
    torch.cuda.synchronize()
    wanted, _ = expected(case)
    for out in outs:
        assert (out.double() - wanted).norm() <= TOLERANCE["bfloat16"] * wanted.norm()
