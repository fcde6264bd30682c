"""The Hopper decoding kernel: its rules, its machine code compiled without a GPU, and its results where there is one.

What its source computes is tested in test_flash_decode_hopper_source.py.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.hopper.decode.kernel import FlashDecodeHopper
from blocktune.kernels.portable.decode import scratch
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.candidates.space import configs_of
from tests.kernels.portable.decode.test_flash_decode import Case, assert_close, case_of, expected, paged
from tests.support.compiles.measures import compile_resources
from tests.support.hopper_gpu import skip_elsewhere
from tests.support.machine_code.kernels import machine_code, mnemonic
from tests.support.triton_modes import compiled_here

HOPPER = limits_for((9, 0))
KERNEL = FlashDecodeHopper()
CACHED = Features(cached=True)


def shape_of(features: Features | None = None, **changes: Any) -> AttentionShape:
    sizes = {"batch": 1, "num_heads": 32, "num_heads_kv": 8, "seqlen_q": 1, "seqlen_k": 8192, "head_dim": 128}
    sizes |= {"dtype": "bfloat16", "features": features or Features()} | changes
    return AttentionShape(**({"head_dim_v": sizes["head_dim"]} | sizes))


def config_of(block_n: int = 128, splits: int = 16, warps: int = 8, stream: int = 1) -> KernelConfig:
    return KernelConfig(KERNEL.name, 16, block_n, warps, 1, (("splits", splits), ("stream", stream)))


# ---- rules


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "computes float16 and bfloat16, but got float32"),
        ({"head_dim": 84}, "`head_dim in range(16, 129, 8)` must hold"),
        ({"head_dim_v": 136}, "`head_dim_v in range(16, 129, 8)` must hold"),
        ({"seqlen_q": 5}, "`group_size * seqlen_q <= 16` must hold for flash_decode_hopper, but got 20 rows"),
        ({"batch": 65536}, "`batch <= 65535` must hold"),
        ({"features": Features(cached=True, page_size=8)}, "`16 <= page_size <= 256` must hold"),
        ({"features": Features(window=(100, 0))}, "does not know window"),
    ],
)
def test_shapes_that_it_leaves_to_others(changes: dict[str, Any], reason: str) -> None:
    assert reason in (KERNEL.unsupported(shape_of(**changes), HOPPER) or "")


@pytest.mark.parametrize("name", ["flash_decode_hopper", "flash_decode8_hopper"])
def test_a_launch_past_its_rows_is_refused(name: str) -> None:
    """Its tile would leave out rows without a word."""
    kernel = get_kernel(name)
    kernel.bind(replace(config_of(), kernel=name), shape_of(seqlen_q=4))
    with pytest.raises(ValueError, match="at most 16 rows, but b1 h32/8 s5/8192 d128 bf16 has 20"):
        kernel.bind(replace(config_of(), kernel=name), shape_of(seqlen_q=5))


@pytest.mark.parametrize("cc", [cc for cc in known_ccs() if cc != (9, 0)], ids=str)
def test_other_gpus_are_left_to_others(cc: tuple[int, int]) -> None:
    assert f"(compute capability 9.0) alone, but got {cc[0]}.{cc[1]}" in (
        KERNEL.unsupported(shape_of(), limits_for(cc)) or ""
    )


@pytest.mark.parametrize("rows", [(1, 1), (4, 1), (4, 4), (7, 2)])
@pytest.mark.parametrize("seqlen_k", [1, 1000, 1 << 20])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_default_config_breaks_no_rule(head_dim: int, seqlen_k: int, rows: tuple[int, int]) -> None:
    group, queries = rows
    shape = shape_of(head_dim=head_dim, seqlen_k=seqlen_k, num_heads=8 * group, seqlen_q=queries)
    assert KERNEL.violations(KERNEL.default_config(shape, HOPPER), shape, HOPPER) == ()


def test_default_splits_fill_a_large_gpu() -> None:
    found = {batch: KERNEL.default_config(shape_of(batch=batch), HOPPER).parameters["splits"] for batch in (1, 8, 64)}
    assert found == {1: 16, 8: 2, 64: 1}


def test_many_rows_get_two_blocks_a_multiprocessor_if_these_have_many_keys() -> None:
    found = {batch: KERNEL.default_config(shape_of(batch=batch, seqlen_q=4), HOPPER) for batch in (1, 8, 64)}
    sizes = {batch: (one.block_n, one.num_warps, one.parameters["splits"]) for batch, one in found.items()}
    assert sizes == {1: (128, 8, 16), 8: (64, 4, 4), 64: (64, 4, 1)}
    # 1024 keys a share are enough for two, but not half of the multiprocessors for a pair each
    assert KERNEL.default_config(shape_of(seqlen_q=4, seqlen_k=1 << 15), HOPPER).num_warps == 4
    few = shape_of(seqlen_q=4, seqlen_k=1 << 20, num_heads=4, num_heads_kv=1)
    assert KERNEL.default_config(few, HOPPER).num_warps == 8


def test_keys_leave_the_cache_first_unless_they_are_many() -> None:
    shapes = [shape_of(batch=batch, seqlen_k=8192) for batch in (1, 8, 9)]  # 8: exactly 256 MiB
    assert [KERNEL.default_config(shape, HOPPER).parameters["stream"] for shape in shapes] == [1, 1, 0]


def test_a_warp_has_a_whole_tile_that_fits_its_registers() -> None:
    assert KERNEL.violations(config_of(64), shape_of(), HOPPER) == (
        "`block_n / num_warps >= 16` keys a warp and `tiles <= 184` registers a thread must hold for "
        "flash_decode_hopper, but got 8 and 82. Take another block_n.",
    )
    (text,) = KERNEL.violations(config_of(512), shape_of(), HOPPER)
    assert "but got 64 and 320" in text
    (text,) = KERNEL.violations(config_of(256), shape_of(seqlen_q=4), HOPPER)  # 16 rows
    assert "but got 32 and 240" in text
    many = shape_of(batch=60000, seqlen_q=2)
    assert "Take fewer splits." in KERNEL.violations(config_of(splits=64), many, HOPPER)[0]


def test_only_keys_and_values_need_aligned_rows() -> None:
    q, k, v = (torch.empty(1, heads, 100, 64, dtype=torch.float16) for heads in (4, 2, 2))
    odd = torch.empty(1, 2, 100, 65, dtype=torch.float16)[..., :64]
    assert KERNEL.layout_problem(torch.empty(1, 4, 1, 65)[..., :64], k, v) is None
    for name, tensors in (("key", (q, odd, v)), ("value", (q, k, odd))):
        assert f"rows of {name} must be contiguous" in (KERNEL.layout_problem(*tensors) or "")
    far = torch.empty(1, 1, 1, 64, dtype=torch.float16, device="meta").expand(1, 1, 1 << 26, 64)
    assert "must be contiguous" in (KERNEL.layout_problem(q, far, v) or "")


# ---- machine code


@compiled_here
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (shape_of(), config_of(256)),
        (shape_of(seqlen_q=4, causal=Causal.LOWER_RIGHT, features=CACHED), config_of()),
        (shape_of(features=Features(cached=True, page_size=16)), config_of(128, 64, 4, 0)),
        (shape_of(head_dim=64, dtype="float16"), config_of(512, 1)),
        (shape_of(head_dim=72), config_of(128)),
        (shape_of(head_dim=40, seqlen_q=4, features=CACHED), config_of(256)),
        (shape_of(head_dim=120, head_dim_v=88, features=Features(cached=True, page_size=16)), config_of(64, 64, 4, 0)),
    ],
    ids=lambda value: value.label,
)
def test_machine_code(
    shape: AttentionShape, config: KernelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No spills; keys and values go from memory to the products' registers and nowhere else; a whole tile is on its way
    before the first product, and again before the loop's end."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert KERNEL.violations(config, shape, HOPPER) == ()
    resources = compile_resources(KERNEL, config, shape, (9, 0))
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.tensor_cores == "mma"
    assert resources.shared_bytes == KERNEL.shared_bytes(config, shape, HOPPER)
    code = [mnemonic(text) for _, text in machine_code(KERNEL, config, shape, tmp_path)]
    products = [place for place, name in enumerate(code) if name.startswith("HMMA")]
    exchanges = [place for place, name in enumerate(code) if name.startswith(("STS", "LDS", "BAR", "LDSM"))]
    assert min(exchanges) > max(products)
    load = "LDG.E.EF.128" if config.parameters["stream"] else "LDG.E.128"
    wide = [place for place, name in enumerate(code) if name == load]
    lines = 4 * -(-shape.head_dim // 32) + 8 * -(-shape.head_dim_v // 64)  # threads for a key, 16 bytes each
    tile = config.block_n // config.num_warps * lines // 32
    assert sum(place < products[0] for place in wide) >= tile
    assert sum(products[0] < place < min(exchanges) for place in wide) == tile


# ---- results on a GPU


@pytest.fixture
def hopper_gpu() -> None:
    skip_elsewhere(KERNEL)


def launched(config: KernelConfig, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    assert KERNEL.violations(config, case.shape, HOPPER) == ()
    out = torch.full((*case.q.shape[:3], case.shape.head_dim_v), float("nan"), dtype=case.q.dtype, device="cuda")
    lse = torch.full(case.q.shape[:3], float("nan"), device="cuda")
    given = [case.extras] if case.shape.features else []
    KERNEL.bind(config, case.shape)(case.q, case.k, case.v, out, lse, case.shape.head_dim**-0.5, *given)
    return out, lse


def on_gpu(test: Any) -> Any:
    """A kernel that hangs blocks its process for good: the timeout kills it."""
    marks = pytest.mark.gpu, pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("hopper_gpu")
    for mark in marks:
        test = mark(test)
    return test


@on_gpu
@pytest.mark.parametrize("queries", [(1, Causal.NONE), (4, Causal.LOWER_RIGHT), (2, Causal.UPPER_LEFT)])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 96, 120, 128])
def test_every_tile(head_dim: int, queries: tuple[int, Causal]) -> None:
    seqlen_q, causal = queries
    shape = shape_of(batch=2, num_heads=8, num_heads_kv=2, seqlen_k=1500, head_dim=head_dim, seqlen_q=seqlen_q)
    case = case_of(replace(shape, causal=causal))
    wanted = expected(case)
    for config in configs_of(KERNEL):
        if config.parameters["splits"] in (1, 4, 64) and not KERNEL.violations(config, case.shape, HOPPER):
            assert_close(launched(config, case), wanted, "bfloat16")


@on_gpu
@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (7, 1), (16, 1), (22, 2)])
@pytest.mark.parametrize("seqlen_k", [1, 15, 127, 128, 129, 3000])
def test_groups_and_lengths(seqlen_k: int, heads: tuple[int, int]) -> None:
    case = case_of(shape_of(batch=3, num_heads=heads[0], num_heads_kv=heads[1], seqlen_k=seqlen_k, dtype="float16"))
    for splits in (1, 8):
        assert_close(launched(config_of(splits=splits), case), expected(case), "float16")


@on_gpu
@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
@pytest.mark.parametrize("seqlen_q", [1, 3, 4])
def test_caches(seqlen_q: int, page_size: int) -> None:
    features = Features(cached=True, page_size=page_size)
    shape = shape_of(features, batch=5, seqlen_q=seqlen_q, seqlen_k=1000, causal=Causal.LOWER_RIGHT)
    case = case_of(shape, (0, 1000, 3, 513, 64))
    asked = paged(case, 400) if page_size else case
    for splits in (1, 4):
        assert_close(launched(config_of(splits=splits), asked), expected(case), "bfloat16")


@on_gpu
def test_launches_graphs_and_streams_repeat_to_the_bit() -> None:
    case = case_of(shape_of(seqlen_k=2048))
    outs = [torch.full_like(case.q, float("nan")) for _ in range(4)]
    fast = KERNEL.bind(config_of(), case.shape).pinned(case.q, case.k, case.v, outs[0], None, 0.1)

    def run(out: torch.Tensor) -> None:
        fast(case.q, case.k, case.v, out, None, 0.1)

    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph, out in zip(graphs, outs[1:], strict=False):
        with torch.cuda.graph(graph):
            run(out)
            run(out)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            run(outs[3])
        run(outs[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.isfinite(outs[0]).all()
    kept = itertools.chain((found[-1] for found in scratch._kept.values()), scratch._spare.values())
    assert not any(counters.any() for counters in kept)
