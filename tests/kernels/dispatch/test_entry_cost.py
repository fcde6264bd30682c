"""What a call of every entry point costs on the host, of tensors so small that the GPU waits; on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune.kernels.api.block_sparse import block_sparse_attention
from blocktune.kernels.api.flash_attn import flash_attn_func, flash_attn_varlen_func
from blocktune.kernels.api.kv_cache import flash_attn_with_kvcache
from blocktune.kernels.dispatch.dispatcher import attention
from blocktune.kernels.values.block_mask import BlockMask
from tests.support.host_time import HostTime, calmest
from tests.support.recording import HOST_COST

pytestmark = pytest.mark.gpu

CALLS = 2000
P99_RATIO = 3.0
"""Of a 99th percentile to its median; beyond it something else than the call takes part."""
SIZE = (1, 4, 128, 64)
PACKED, CACHE, NEW = (256, 4, 64), (2, 512, 2, 64), (2, 1, 2, 64)

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a call may cost: in microseconds, and times what PyTorch's attention does."""

    us: float = float("inf")
    ratio: float = float("inf")


def three(size: tuple[int, ...] = SIZE, *, grad: bool = False) -> list[Tensor]:
    made = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    return [tensor.requires_grad_(grad) for tensor in made]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def both(tensors: list[Tensor], *rest: Any, **options: Any) -> tuple[Call, Call]:
    return lambda: attention(*tensors, *rest, **options), lambda: sdpa(*tensors, *rest, **options)


def backward_of(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Call:
    out = attend(*tensors)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True)


def backward() -> tuple[Call, Call]:
    tensors = three(grad=True)
    return backward_of(attention, tensors), backward_of(sdpa, tensors)


def flash(**options: Any) -> tuple[Call, None]:
    tensors = three((1, 128, 4, 64))
    return lambda: flash_attn_func(*tensors, **options), None


def packed(*, grad: bool = False) -> Callable[..., Any]:
    ends = int32(0, 100, 256)
    return lambda *tensors: flash_attn_varlen_func(*tensors, ends, ends, 160, 160)


def varlen() -> tuple[Call, None]:
    attend, tensors = packed(), three(PACKED)
    return lambda: attend(*tensors), None


def varlen_backward() -> tuple[Call, None]:
    return backward_of(packed(), three(PACKED, grad=True)), None


def decode(*, new: bool) -> tuple[Call, None]:
    query, lengths = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16, device="cuda"), int32(100, 200)
    keys, values, _ = three(CACHE)
    rows = three(NEW)[:2] if new else (None, None)
    return lambda: flash_attn_with_kvcache(query, keys, values, *rows, cache_seqlens=lengths), None


def block_sparse() -> tuple[Call, None]:
    tensors, blocks = three(), BlockMask(64, 64, torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cuda"))
    return lambda: block_sparse_attention(*tensors, blocks), None


def compiled() -> tuple[Call, Call]:
    tensors = three()
    ours, pytorchs = torch.compile(lambda *all: attention(*all)), torch.compile(lambda *all: sdpa(*all))
    return lambda: ours(*tensors), lambda: pytorchs(*tensors)


MASK = (1, 1, 128, 128)
ENTRIES: dict[str, tuple[Callable[[], tuple[Call, Call | None]], Bar]] = {
    "forward": (lambda: both(three()), Bar(ratio=1.0)),
    "forward with gradients": (lambda: both(three(grad=True)), Bar(ratio=1.3)),
    "backward": (backward, Bar(ratio=1.0)),
    "boolean mask": (lambda: both(three(), torch.rand(MASK, device="cuda") > 0.3), Bar(25, 1.0)),
    "dropout": (lambda: both(three(), dropout_p=0.1), Bar()),
    "window": (lambda: flash(window_size=(32, 0)), Bar(25)),
    "soft cap": (lambda: flash(softcap=20.0), Bar(25)),
    "ALiBi": (lambda: flash(alibi_slopes=torch.rand(4, device="cuda")), Bar()),
    "packed sequences": (varlen, Bar(35)),
    "packed sequences, backward": (varlen_backward, Bar()),
    "cache": (lambda: decode(new=False), Bar(25)),
    "cache, with new keys": (lambda: decode(new=True), Bar(45)),
    "block mask": (block_sparse, Bar()),
    "compiled graph": (compiled, Bar(ratio=1.1)),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_host_cost_of_an_entry_point(
    entry: str, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    make, bar = ENTRIES[entry]
    ours, pytorchs = make()
    calls = {"ours": ours} if pytorchs is None else {"ours": ours, "sdpa": pytorchs}
    for call in calls.values():
        call()
        call()
    times = calmest(calls, CALLS)
    record_property(HOST_COST, {"entry": entry, "times": {what: one.document for what, one in times.items()}})
    with capsys.disabled():
        print(f"\n{entry}: " + "; ".join(f"{what} {one}" for what, one in times.items()))
    problems = list(missed(bar, times))
    assert not problems, problems


def missed(bar: Bar, times: dict[str, HostTime]) -> list[str]:
    """The bars that a call does not keep."""
    ours, pytorchs = times["ours"], times.get("sdpa")
    problems = []
    if ours.median_us > bar.us:
        problems.append(f"{ours.median_us:.1f} us, at most {bar.us} us wanted")
    if pytorchs is not None and ours.median_us > bar.ratio * pytorchs.median_us:
        problems.append(f"{ours.median_us / pytorchs.median_us:.2f} times PyTorch's, at most {bar.ratio} wanted")
    if ours.p99_us > P99_RATIO * ours.median_us:
        problems.append(f"a 99th percentile of {ours.p99_us:.1f} us, at most {P99_RATIO} medians wanted")
    return problems
