"""Times the Hopper backwards in turns with FlashAttention-4, and groups of heads with cuDNN, on a GPU.

PYTHONPATH=. python -m tools.bench.backward_peers --out results/h200-ahead.backward-peers.json [--rows plain]

Rows are `plain` (lengths of 512 to 16384, 64 and 128 columns), `features` (groups, windows, soft caps, ragged lengths
and a fixed order), `order` (a fixed order at other lengths and 256 columns) and `sparse` (block masks, next to the
dense backward and the portable kernel); all of them unless some are named. Each is written once it is measured, in
place of what the file says of its shape. A time is the median of the rounds, in which contenders follow each other in a
random order, each behind a launch that overwrites the L2 cache; the host is ahead of the device. All launches of a
backward count. What a peer does not compute is left out.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hardware.nvml import driver_version
from blocktune.kernels.registry import default_kernel, get_kernel
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.measure.environment import source_commit

HOPPER = limits_for((9, 0))
TOKENS, COLUMNS, SOFTCAP = 16384, 2048, 30.0
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROUNDS = 11
FLUSH_BYTES = 160 << 20
HEAD_START_CYCLES = 4_000_000
MASK_BLOCK, DENSITY = 128, 0.25
FLASH, CUDNN = "flash-attn-4", "cuDNN"

Run = Callable[[], object]


def shape_of(head_dim: int, seqlen: int, causal: bool, features: str = "", **changes: int) -> AttentionShape:
    sizes = {"batch": TOKENS // seqlen, "num_heads": COLUMNS // head_dim} | changes
    sizes = {"num_heads_kv": sizes["num_heads"], "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": head_dim} | sizes
    mask = Causal.LOWER_RIGHT if causal else Causal.NONE
    own = {"causal": mask, "features": Features.parse(features), "direction": Direction.BACKWARD, "dtype": "bfloat16"}
    return AttentionShape(head_dim_v=head_dim, **sizes, **own)  # type: ignore[arg-type]


def plain() -> Iterator[AttentionShape]:
    for head_dim in (128, 64):
        for causal in (False, True):
            yield from (shape_of(head_dim, seqlen, causal) for seqlen in LENGTHS)


def features() -> Iterator[AttentionShape]:
    for head_dim, (heads, heads_kv), seqlen, batch in (
        (128, (16, 4), 4096, 1), (128, (16, 2), 4096, 1), (128, (16, 1), 8192, 1), (64, (32, 4), 4096, 2),
    ):  # fmt: skip
        for causal in (False, True):
            yield shape_of(head_dim, seqlen, causal, num_heads=heads, num_heads_kv=heads_kv, batch=batch)
    yield shape_of(128, 4096, True, batch=4, num_heads=32, num_heads_kv=8)
    for head_dim in (128, 64):
        yield from (shape_of(head_dim, 4096, True, words) for words in ("window=1023:-1", "softcap", "deterministic"))
        yield from (shape_of(head_dim, 4000, causal, batch=4) for causal in (False, True))


def order() -> Iterator[AttentionShape]:
    for head_dim in (128, 64):
        yield from (shape_of(head_dim, seqlen, True, "deterministic") for seqlen in (1024, 2048, 8192, 16384))
        yield shape_of(head_dim, 4096, False, "deterministic")
    yield from (shape_of(256, seqlen, True, "deterministic") for seqlen in (4096, 8192))


def sparse() -> Iterator[AttentionShape]:
    for head_dim in (128, 64):
        yield from (shape_of(head_dim, seqlen, False, "block_sparse") for seqlen in (4096, 8192, 16384))
        yield shape_of(head_dim, 8192, True, "block_sparse")


ROWS: Mapping[str, Callable[[], Iterator[AttentionShape]]] = {
    "plain": plain, "features": features, "order": order, "sparse": sparse,
}  # fmt: skip


class Problem:
    """Tensors of a shape, with a log-sum-exp about as normally distributed scores have it."""

    def __init__(self, shape: AttentionShape) -> None:
        torch.manual_seed(0)
        self.shape, self.scale = shape, shape.head_dim**-0.5
        heads = (shape.num_heads, shape.num_heads_kv, shape.num_heads_kv, shape.num_heads, shape.num_heads)
        widths = (shape.head_dim, shape.head_dim, *(shape.head_dim_v,) * 3)
        self.q, self.k, self.v, self.out, self.dout = (
            torch.randn(shape.batch, count, shape.seqlen_q, width, device="cuda", dtype=torch.bfloat16)
            for count, width in zip(heads, widths, strict=True)
        )
        self.lse = (count_seen_keys(shape).log() + 0.5).expand(self.q.shape[:3]).contiguous()
        self.gradients = [torch.empty_like(tensor) for tensor in (self.q, self.k, self.v)]
        self.mask = random_mask(shape) if shape.features.mask is MaskKind.BLOCK_SPARSE else None
        self.bias = random_bias(shape) if shape.features.mask is MaskKind.ADDITIVE else None

    def own(self, kernel: AttentionKernel, changes: Features | None = None) -> Run:
        """Return the default of a kernel, for other features of the call if some are given."""
        shape = self.shape if changes is None else replace(self.shape, features=changes)
        mask = self.mask if shape.features.mask is MaskKind.BLOCK_SPARSE else None
        extras = Extras(softcap=SOFTCAP if shape.features.softcap else 0.0, block_mask=mask, mask=self.bias)
        launch = kernel.bind(kernel.default_config(shape, HOPPER), shape)
        given = self.q, self.k, self.v, self.out, self.lse, self.dout, *self.gradients, self.scale, extras
        return lambda: launch(*given)

    def flash(self) -> Run:
        """Return FlashAttention-4's backward."""
        from flash_attn.cute.interface import _flash_attn_bwd

        shape = self.shape
        tensors = [t.transpose(1, 2).contiguous() for t in (self.q, self.k, self.v, self.out, self.dout)]
        options: dict[str, Any] = {"softmax_scale": self.scale, "causal": shape.causal is not Causal.NONE}
        if shape.features.window:
            options |= {"window_size_left": shape.features.window[0], "window_size_right": 0, "causal": False}
        options |= {"softcap": SOFTCAP} if shape.features.softcap else {}
        options |= {"deterministic": True} if shape.features.deterministic else {}
        options |= {"block_sparse_tensors": flash_lists(self.mask, shape)} if self.mask else {}
        return lambda: _flash_attn_bwd(*tensors, self.lse, **options)

    def cudnn(self) -> Run:
        """Return the backward of PyTorch's cuDNN attention."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        leaves = [tensor.detach().requires_grad_() for tensor in (self.q, self.k, self.v)]
        causal = self.shape.causal is not Causal.NONE
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        return lambda: torch.autograd.grad(out, leaves, self.dout, retain_graph=True)


def count_seen_keys(shape: AttentionShape) -> torch.Tensor:
    """Return how many keys each query sees, under a block mask about."""
    every = torch.full((shape.seqlen_q,), float(shape.seqlen_k), device="cuda")
    if shape.causal is not Causal.NONE:
        every = torch.arange(1.0, shape.seqlen_q + 1, device="cuda")
    if shape.features.window:
        every = every.clamp(max=shape.features.window[0] + 1)
    return (every * DENSITY).clamp(min=1) if shape.features.mask is MaskKind.BLOCK_SPARSE else every


def random_mask(shape: AttentionShape) -> BlockMask:
    """Return a mask of all heads with as many active blocks in every row of blocks."""
    blocks, generator = -(-shape.seqlen_q // MASK_BLOCK), torch.Generator().manual_seed(3)
    ranks = torch.rand(1, 1, blocks, blocks, generator=generator).argsort(-1).argsort(-1)
    return BlockMask(MASK_BLOCK, MASK_BLOCK, (ranks < round(DENSITY * blocks)).cuda())


def random_bias(shape: AttentionShape) -> torch.Tensor:
    """Return an additive mask of all heads."""
    return torch.randn(1, 1, shape.seqlen_q, shape.seqlen_k, device="cuda", dtype=torch.bfloat16)


def flash_lists(mask: BlockMask, shape: AttentionShape) -> Any:
    """Return a mask as FlashAttention-4 takes it: all blocks are whole."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    columns = mask.mask.transpose(2, 3).expand(shape.batch, shape.num_heads, -1, -1)
    count = columns.sum(-1, dtype=torch.int32)
    found = columns.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()
    none = torch.zeros_like(count), torch.zeros_like(found)
    return BlockSparseTensorsTorch(*none, count, found, block_size=(MASK_BLOCK, MASK_BLOCK))


def share_of(mask: BlockMask, shape: AttentionShape) -> float:
    """Return the share of the pairs that the dense backward computes."""
    dense = mask.to_dense(shape.seqlen_q, shape.seqlen_k)[0, 0]
    if shape.causal is Causal.NONE:
        return float(dense.float().mean())
    return float(dense.tril().float().sum() / dense.new_ones(dense.shape).tril().float().sum())


def contenders(problem: Problem) -> dict[str, Run]:
    shape = problem.shape
    kernel = default_kernel(shape, HOPPER)
    assert kernel is not None
    found = {"default": problem.own(kernel)}
    if problem.mask is not None:
        found["dense"] = problem.own(get_kernel("flash_bwd_hopper"), Features())
        found["flash_bwd_sparse"] = problem.own(get_kernel("flash_bwd_sparse"))
        found["in a fixed order"] = problem.own(kernel, Features.parse("block_sparse deterministic"))
    if shape.features.deterministic:
        found["in any order"] = problem.own(kernel, Features())
    if problem.bias is None and (problem.mask is None or shape.causal is Causal.NONE):
        found[FLASH] = problem.flash()
    if shape.group_size > 1:
        found[CUDNN] = problem.cudnn()
    return found


def computes(name: str, run: Run) -> bool:
    """Return whether a contender computes the shape; says why a peer does not."""
    try:
        run()
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        if name not in (FLASH, CUDNN):
            raise
        print(f"{name}: {error}", flush=True)
        return False
    return True


def times_of(found: Mapping[str, Run], flush: torch.Tensor) -> dict[str, float]:
    """Return the median of each contender that computes the shape, in microseconds."""
    found = {name: run for name, run in found.items() if computes(name, run)}
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(ROUNDS):
        marks = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in found}
        torch.cuda._sleep(HEAD_START_CYCLES)
        for name in random.sample(list(found), len(found)):
            flush.zero_()
            marks[name][0].record()
            found[name]()
            marks[name][1].record()
        torch.cuda.synchronize()
        for name, (begin, end) in marks.items():
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def document_at(path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    software = {name: version(name).partition("+")[0] for name in (FLASH, "torch", "triton")}
    cudnn = torch.backends.cudnn.version() or 0
    software |= {"driver": driver_version(), "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"}
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"), "device": torch.cuda.get_device_name(),
        "environment": software, "format": "blocktune-backward-peers", "rows": [], "schema": 1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", choices=ROWS, action="append")
    asked = parser.parse_args()
    document, flush = document_at(asked.out), torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for name in asked.rows or ROWS:
        for shape in ROWS[name]():
            problem = Problem(shape)
            row = {"commit": source_commit(), "shape": shape.to_json(), "time_us": times_of(contenders(problem), flush)}
            row |= {"taken_at": datetime.now(UTC).isoformat(timespec="seconds")}
            row |= {"share": round(share_of(problem.mask, shape), 4)} if problem.mask is not None else {}
            others = [other for other in document["rows"] if other["shape"] != row["shape"]]
            document["rows"] = [*others, row]
            asked.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
            print(shape.label, row["time_us"], flush=True)


if __name__ == "__main__":
    main()
