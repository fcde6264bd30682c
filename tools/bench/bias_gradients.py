"""Times of training steps whose additive mask requires a gradient, beside who else computes it.

python -m tools.bench.bias_gradients --out results/h200.bias-gradients.table.json
python -m tools.bench.bias_gradients --tiles --out tiles.json

A step is a forward and a backward with the gradients of query, key, value and mask, which are checked against float32
before they are timed. FlexAttention is compiled with the mask captured by its score function. `--tiles` times our pass
over the mask alone, by tile. Everything is compiled in `--workers` processes ahead, and all take turns in every round.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune import attention
from blocktune.db.exchange.document import save_text
from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.portable.backward.bias import BiasTile, bias_gradient
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.protocol import column
from tests.support.ranks.document import new_document, table

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A call with a mask [batch or 1, heads or 1, length or 1, length]."""

    name: str
    batch: int
    heads: int
    length: int
    dim: int
    own: tuple[bool, bool, bool]

    @property
    def mask_sizes(self) -> tuple[int, int, int, int]:
        sizes = self.batch, self.heads, self.length
        batch, heads, rows = (size if own else 1 for size, own in zip(sizes, self.own, strict=True))
        return batch, heads, rows, self.length

    @property
    def label(self) -> str:
        mask = ", ".join(map(str, self.mask_sizes))
        return f"{self.name}: b{self.batch} h{self.heads} s{self.length} d{self.dim}, mask [{mask}]"


BY_HEAD, BY_PAIR, BY_KEY = (False, True, True), (True, True, True), (True, False, False)
CASES = (
    Case("triangle", 256, 4, 256, 32, BY_HEAD),
    Case("triangle", 512, 4, 512, 32, BY_HEAD),
    Case("triangle", 768, 4, 768, 32, BY_HEAD),
    Case("T5", 8, 12, 1024, 64, BY_HEAD),
    Case("Swin", 2048, 4, 49, 32, BY_HEAD),
    Case("wide", 4, 16, 2048, 128, BY_HEAD),
    Case("own masks", 2, 16, 2048, 64, BY_PAIR),
    Case("keys", 8, 16, 2048, 64, BY_KEY),
)
TILES = tuple(
    BiasTile(*own)
    for own in ((128, 128, 8, 1), (128, 128, 8, 2), (128, 64, 4, 1), (128, 64, 4, 2), (128, 64, 8, 2), (64, 128, 4, 2),
                (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3))
)  # fmt: skip
TOLERANCE = 2e-2
"""Relative Frobenius error of a gradient in bfloat16."""
ROUNDS, HEAT_SECONDS = 10, 0.2
HOW = f"medians of {ROUNDS} rounds in turns, the L2 cache overwritten before every step; bf16, a mask in bf16."
COLUMNS = "shape", "ours, µs", "without its gradient, µs", "fastest peer, µs", "peer", "over the peer"


def leaves(case: Case) -> list[Tensor]:
    """Return query, key, value and mask."""
    torch.manual_seed(0)
    sizes = *((case.batch, case.heads, case.length, case.dim),) * 3, case.mask_sizes
    return [torch.randn(own, device="cuda", dtype=torch.bfloat16).requires_grad_() for own in sizes]


def flex(case: Case) -> Attend:
    """Return FlexAttention with a mask that its score function captures."""
    from torch.nn.attention.flex_attention import flex_attention

    own_batch, own_heads, own_rows = case.own

    @partial(torch.compile, dynamic=False, fullgraph=True)
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + mask[b if own_batch else 0, h if own_heads else 0, i if own_rows else 0, j]

        out: Tensor = flex_attention(q, k, v, score_mod=score)
        return out

    return attend


def held(backend: SDPBackend) -> Attend:
    """Return PyTorch's attention, held to one back end."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, mask)

    return attend


def peers(case: Case) -> dict[str, Attend]:
    backends = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {name: held(backend) for name, backend in backends.items()} | {"FlexAttention": flex(case)}


def step(attend: Attend, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of what requires one."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return torch.autograd.grad(attend(*inputs), wanted, grad)


def exact_gradient(inputs: list[Tensor], grad: Tensor) -> Tensor:
    """Return the mask's gradient in float32, entry by entry of the batch."""
    total = torch.zeros(inputs[3].shape, device="cuda")
    for entry in range(inputs[0].shape[0]):
        one = slice(entry, entry + 1)
        q, k, v = (tensor[one].detach().float() for tensor in inputs[:3])
        own = one if inputs[3].shape[0] > 1 else slice(None)
        mask = inputs[3][own].detach().float().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            (found,) = torch.autograd.grad(sdpa(q, k, v, mask), mask, grad[one].float())
        total[own] += found
    return total


def checked(attend: Attend, inputs: list[Tensor], grad: Tensor, right: Tensor) -> Thunk:
    """Return the step whose mask gradient is right.

    Raises:
        ValueError: it is not.
    """
    found = step(attend, inputs, grad)[3].float()
    error = float((found - right).norm() / right.norm())
    if not error <= TOLERANCE:
        raise ValueError(f"the gradient of the mask is wrong by {error:.3g} of its norm")
    return partial(step, attend, inputs, grad)


def launches_of(case: Case) -> Iterator[tuple[str, Thunk]]:
    """Give the steps that are right: ours, ours with a fixed mask, and the peers'."""
    inputs = leaves(case)
    grad = torch.randn_like(inputs[0])
    right = exact_gradient(inputs, grad)
    yield "ours", checked(attention, inputs, grad, right)
    yield "fixed", partial(step, attention, [*inputs[:3], inputs[3].detach()], grad)
    for name, attend in peers(case).items():
        try:
            yield name, checked(attend, inputs, grad, right)
        except (RuntimeError, ValueError) as error:
            print(f"{case.label}: {name}: {str(error).splitlines()[0]}", flush=True)


def tile_launches(case: Case) -> Iterator[tuple[str, Thunk]]:
    """Give our pass over the mask by the tiles that launch."""
    q, k, v, mask = (tensor.detach() for tensor in leaves(case))
    out, dout = torch.randn_like(q), torch.randn_like(q)
    lse = torch.full(q.shape[:3], 10.0, device="cuda")
    shape = AttentionShape(
        batch=case.batch, num_heads=case.heads, num_heads_kv=case.heads, seqlen_q=case.length, seqlen_k=case.length,
        head_dim=case.dim, head_dim_v=case.dim, dtype="bfloat16", direction=Direction.BACKWARD,
        features=Features.parse("additive"),
    )  # fmt: skip
    for tile in TILES:
        launch = partial(bias_gradient, shape, q, k, v, out, lse, dout, case.dim**-0.5, Extras(mask=mask), tile)
        name = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
        try:
            launch()
        except Exception as error:  # Triton's own classes, by version
            print(f"{case.label}: {name}: {str(error).splitlines()[0]}", flush=True)
        else:
            yield name, launch


def compile_one(case: Case, tiles: bool) -> None:
    """Run everything of a case once, which leaves it in the caches on disk."""
    for _ in tile_launches(case) if tiles else launches_of(case):
        pass


def times_of(case: Case, clock: CudaClock, tiles: bool) -> dict[str, float]:
    """Return the medians of one case in microseconds, by who computes it."""
    launches = dict(tile_launches(case) if tiles else launches_of(case))
    clock.heat(next(iter(launches.values())), HEAT_SECONDS)
    rounds = clock.rounds(list(launches.values()), ROUNDS)
    return {name: median(column(rounds, place)) for place, name in enumerate(launches)}


def cells(case: Case, times: dict[str, float]) -> list[str]:
    """Return a row of the table."""
    others = {name: time_us for name, time_us in times.items() if name not in ("ours", "fixed")}
    fastest = min(others, key=others.__getitem__) if others else None
    own = [f"{times[name]:,.1f}" for name in ("ours", "fixed")]
    if fastest is None:
        return [case.label, *own, "-", "-", "-"]
    return [case.label, *own, f"{others[fastest]:,.1f}", fastest, f"{others[fastest] / times['ours']:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true", help="time our pass over the mask, by tile")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    end, rows = time.monotonic() + options.seconds, []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, *work) for work in product(CASES, (options.tiles,))]:
            done.result()
    clock, document = CudaClock(), new_document(torch.device("cuda"))
    for case in CASES:
        if time.monotonic() > end:
            break
        times = times_of(case, clock, options.tiles)
        print(case.label, {name: round(time_us, 1) for name, time_us in times.items()}, flush=True)
        if options.tiles:
            rows.append([case.label, *(f"{name}: {time_us:,.1f}" for name, time_us in times.items())])
        else:
            rows.append(cells(case, times))
        columns = ("shape", *("tile, µs",) * len(TILES)) if options.tiles else COLUMNS
        written = table(document, HOW, columns, rows)
        save_text(json.dumps(written, indent=1, sort_keys=True) + "\n", options.out)


if __name__ == "__main__":
    main()
