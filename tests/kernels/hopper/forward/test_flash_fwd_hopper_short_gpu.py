"""Results of the Hopper forward for short sequences on a GPU: lengths, masks, heads, parameters, streams, graphs.

A kernel that hangs blocks its process for good: the timeouts kill it.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from blocktune.kernels.hopper.forward.short.kernel import FlashForwardHopperShort
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.kernels.hopper.forward import test_flash_fwd_hopper_gpu as other
from tests.kernels.hopper.forward.test_flash_fwd_hopper_gpu import EDGES, HOPPER, compare, shape_of, tensors
from tests.support.hopper_gpu import skip_elsewhere

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]
KERNEL = FlashForwardHopperShort()
check, run = partial(other.check, kernel=KERNEL), partial(other.run, kernel=KERNEL)


@pytest.fixture(autouse=True)
def _hopper_alone() -> None:
    skip_elsewhere(KERNEL)


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_around_the_edges_of_tiles(head_dim: int, causal: Causal) -> None:
    for number, (seqlen_q, seqlen_k) in enumerate(itertools.product(EDGES, EDGES)):
        if number % 6 == 0 or seqlen_q == seqlen_k:
            check(shape_of(seqlen_q, seqlen_k, head_dim, causal=causal), ("bhsd", "bshd")[number % 2])


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [40, 64, 104, 128])
def test_every_width(head_dim: int, dtype: str, causal: Causal) -> None:
    for lengths in ((512, 512), (1024, 1024), (1000, 900), (2100, 700), (513, 1000), (4000, 512)):
        check(shape_of(*lengths, head_dim, causal=causal, dtype=dtype), "bshd")


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(64, 128), (128, 64), (64, 256), (256, 64), (128, 256), (200, 120)]
)
def test_heads_of_two_dimensions(head_dim: int, head_dim_v: int) -> None:
    for causal in Causal:
        check(shape_of(700, 1000, head_dim, head_dim_v=head_dim_v, causal=causal))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (32, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_grouped_heads(heads: tuple[int, int], head_dim: int) -> None:
    """With 32 heads blocks have several tiles, which meet."""
    for causal, layout in itertools.product(Causal, ("bhsd", "bshd")):
        problem = shape_of(777, 1000, head_dim, num_heads=heads[0], num_heads_kv=heads[1], causal=causal, batch=3)
        check(problem, layout)


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize(("block_m", "block_n"), list(itertools.product((128, 192, 256), (64, 128))))
def test_every_block(block_m: int, block_n: int, split: int) -> None:
    """Two stages with separate releases, four with common ones; many tiles a block."""
    problems: Sequence[AttentionShape] = [
        shape_of(1000, 1000, causal=Causal.UPPER_LEFT, num_heads=64),
        shape_of(130, 420, causal=Causal.LOWER_RIGHT),
        shape_of(1024, 1024, num_heads=64, num_heads_kv=8),
        shape_of(64, 64),
    ]
    names = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": 4 - 2 * split}
    for number, problem in enumerate(problems):
        own = {"split_release": split, "early_p": number % 2, "keep_p": number // 2}
        config = KernelConfig.of(KERNEL.name, names | own)
        if not KERNEL.violations(config, problem, HOPPER):  # four stages of 128 keys beside 256 rows have no room
            check(problem, config=config)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_growing_scores_of_many_tiles(head_dim: int) -> None:
    """The running maximum is raised again and again."""
    for causal in (Causal.NONE, Causal.LOWER_RIGHT):
        problem = shape_of(2001, 1003, head_dim, causal=causal, num_heads=32, num_heads_kv=4)
        q, k, v = tensors(problem)
        check(problem, qkv=(q, (k.float() * torch.linspace(16, 0.1, 1003, device="cuda")[:, None]).bfloat16(), v))


CONCURRENT = [shape_of(1000, 1020, 128, causal=Causal.LOWER_RIGHT), shape_of(999, 999, 64)]


@pytest.mark.parametrize("problem", CONCURRENT, ids=lambda problem: problem.label)
def test_two_streams_do_not_take_each_other_s_tiles(problem: AttentionShape) -> None:
    qkv, found = tensors(problem), []
    expected, _ = run(problem, qkv)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for stream in streams * 8:  # in turns, so that launches of both are in flight together
        with torch.cuda.stream(stream):
            found.append(run(problem, qkv)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


def test_a_graph_replays_with_other_numbers() -> None:
    problem = CONCURRENT[0]
    qkv = tensors(problem)
    run(problem, qkv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(problem, qkv)
    for tensor in qkv:
        tensor.normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    compare(problem, captured, attention_reference(*qkv, causal=problem.causal, dtype=torch.float64))
