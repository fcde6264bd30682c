"""First uses of calls with features: right results of all kinds pass, and a wrong one of each kind does not."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import Causal, Direction
from blocktune.kernels.values.tree_mask import tree_words
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.launches.launch_trial import LaunchTrial
from blocktune.runtime.dispatch.torch_math import mathematics, mathematics_gradients
from blocktune.runtime.selection import canary, row_sample

pytestmark = pytest.mark.triton_free

CONFIG = KernelConfig("flash_fwd_general", 64, 64, 4, 2)
NO, UPPER_LEFT, LOWER_RIGHT = Causal
ROWS, KEYS = 150, 180
LENGTHS_Q, LENGTHS_K = (40, 0, 70, 30), (60, 5, 0, 90)


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    canary.counts.clear()
    yield
    canary.counts.clear()


def numbers(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


SEEN = numbers(2, 1, ROWS, KEYS) > -0.8
SEEN[:, :, 7] = False
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (20, 9)},
    "left window": {"window": (33, -1)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": numbers(2, 4).abs() / 4},
    "boolean": {"mask": SEEN},
    "additive": {"mask": numbers(1, 4, ROWS, KEYS, seed=2).masked_fill(~SEEN[:1], -math.inf)},
    "dropout": {"dropout_p": 0.3},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, -math.inf])},
    "packed": {"cu_seqlens_q": bounds(LENGTHS_Q), "cu_seqlens_k": bounds(LENGTHS_K), "lengths": (4, 70, 90)},
    "blocks": {"block_mask": BlockMask(16, 32, numbers(2, 1, 10, 6) > -0.5)},
    "window softcap alibi dropout": {"window": (50, 20), "softcap": 3.0, "alibi_slopes": numbers(1, 4).abs() / 8,
                                     "dropout_p": 0.2},
}  # fmt: skip


def call_of(options: dict[str, Any], causal: Causal = NO, scale: float = 0.25) -> Call:
    return Call.of(causal=causal, scale=scale, **options).with_seed(77, 4)


def tensors(options: dict[str, Any], dtype: torch.dtype, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    packed = "cu_seqlens_q" in options
    batch, rows, keys = (1, sum(LENGTHS_Q), sum(LENGTHS_K)) if packed else (2, ROWS, KEYS)
    sizes = (batch, 4, rows, 16), (batch, 2, keys, 16), (batch, 2, keys, 16)
    query, key, value = ((numbers(*each, seed=n) * size).to(dtype) for n, each in enumerate(sizes, 3))
    return query, key, value


def compared(
    call: Call,
    given: tuple[Tensor, Tensor, Tensor],
    direction: Direction,
    spoil: Callable[..., None] = lambda *results: None,
    computed: Call | None = None,
) -> str | None:
    """The problem of results that PyTorch computes, of another call than that which is compared if there is one."""
    shape = call.shape(*given, direction)
    trial = LaunchTrial.of(shape, *given, call, sums=True)
    rows = trial.rows()
    out, lse, *gradients = trial.results[3:]
    computed = computed or call
    if direction is Direction.FORWARD:
        for memory, found in zip((out, lse), mathematics(*given, computed, lse=True), strict=True):
            memory.copy_(found)
        spoil(out, lse)
    else:
        own = computed
        if given[0].dtype is torch.float32:
            own = replace(computed, extras=replace(computed.extras, sinks=None))
        for memory, found in zip(gradients[1:], mathematics_gradients(*given, own, gradients[0], None), strict=True):
            memory.copy_(found)
        spoil(*gradients[1:])
    problem = trial.problem(CONFIG, rows)
    assert canary.counts["compared"] == 1
    return problem


@pytest.mark.few(40)
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [NO, UPPER_LEFT, LOWER_RIGHT])
@pytest.mark.parametrize("size", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("kind", OPTIONS)
def test_what_is_right_passes(kind: str, size: float, causal: Causal, dtype: torch.dtype, direction: Direction) -> None:
    options = OPTIONS[kind]
    if kind == "blocks" and causal is LOWER_RIGHT:
        causal = UPPER_LEFT
    assert compared(call_of(options, causal), tensors(options, dtype, size), direction) is None


# ---- planted faults


def without_a_tile(*results: Tensor) -> None:
    for result in results:
        result[..., result.shape[-2] // 9 : result.shape[-2] // 9 + 40, :] = 0.0


def of_another_head(*results: Tensor) -> None:
    for result in results:
        result.copy_(result.roll(1, dims=1))


@pytest.mark.few(30)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("spoil", [of_another_head, without_a_tile])
@pytest.mark.parametrize("which", ["out", "dq", "dk", "dv"])
def test_one_wrong_result_is_found(kind: str, spoil: Callable[..., None], which: str) -> None:
    place = {"out": 0, "dq": 0, "dk": 1, "dv": 2}[which]
    direction = Direction.FORWARD if which == "out" else Direction.BACKWARD
    options = OPTIONS[kind]
    problem = compared(
        call_of(options), tensors(options, torch.bfloat16), direction, lambda *results: spoil(results[place])
    )
    assert problem is not None
    assert "differs from attention" in problem


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("added", [0.3, math.nan])
def test_a_wrong_log_sum_exp_is_found(kind: str, added: float) -> None:
    options = OPTIONS[kind]
    given = tensors(options, torch.bfloat16)
    assert compared(call_of(options), given, Direction.FORWARD, lambda out, lse: lse.add_(added)) is not None


ANOTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "no window": ("window", {}),
    "a wider window": ("window", {"window": (28, 9)}),
    "no soft cap": ("softcap", {}),
    "other slopes": ("alibi", {"alibi_slopes": OPTIONS["alibi"]["alibi_slopes"].flip(1)}),
    "a mask of another entry": ("boolean", {"mask": SEEN.flip(0)}),
    "a mask that is one key off": ("boolean", {"mask": SEEN.roll(1, -1)}),
    "no mask": ("boolean", {}),
    "an additive mask of another head": ("additive", {"mask": OPTIONS["additive"]["mask"].roll(1, 1)}),
    "other pairs dropped": ("dropout", {"dropout_p": 0.5}),
    "none dropped": ("dropout", {}),
    "other sequences": ("packed", OPTIONS["packed"] | {"cu_seqlens_k": bounds((50, 10, 5, 90))}),
    "other blocks": ("blocks", {"block_mask": BlockMask(16, 32, ~OPTIONS["blocks"]["block_mask"].mask)}),
}
"""What is called, and what is computed."""


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("fault", ANOTHER)
def test_another_feature_than_the_calls_is_found(fault: str, direction: Direction) -> None:
    kind, computed = ANOTHER[fault]
    given = tensors(OPTIONS[kind], torch.bfloat16)
    assert compared(call_of(OPTIONS[kind]), given, direction, computed=call_of(computed)) is not None


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_sinks_that_are_left_out_are_found(direction: Direction) -> None:
    given = tensors({}, torch.bfloat16)
    if direction is Direction.FORWARD:
        assert compared(call_of(OPTIONS["sinks"]), given, direction, computed=call_of({})) is not None
    assert canary.counts["wrong"] == (direction is Direction.FORWARD)


# ---- caches


def cache_call(paged: bool, seqlen_q: int, **options: Any) -> tuple[Call, tuple[Tensor, Tensor, Tensor]]:
    """A call with 4 entries whose caches have room for 128 keys; what lies behind their lengths is no number."""
    lengths = torch.tensor([100, 7, 128, 66], dtype=torch.int32)
    query = numbers(4, 4, seqlen_q, 16).half()
    key, value = (numbers(4, 2, 128, 16, seed=seed).half() for seed in (2, 3))
    for cache in (key, value):
        for entry, length in enumerate(lengths.tolist()):
            cache[entry, :, length:] = math.nan
    extra: dict[str, Any] = {"cache_seqlens": lengths, "lengths": (4, seqlen_q, 128)}
    if paged:
        key, value = (cache.view(4, 2, 4, 32, 16).transpose(1, 2).reshape(16, 2, 32, 16) for cache in (key, value))
        extra |= {"block_table": torch.arange(16, dtype=torch.int32).view(4, 4), "page_size": 32}
    return Call.of(causal=LOWER_RIGHT, scale=0.25, **extra, **options), (query, key, value)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("options", [{}, {"window": (30, 0)}, {"softcap": 2.0}, {"alibi_slopes": numbers(1, 4).abs()}])
def test_caches(paged: bool, seqlen_q: int, options: dict[str, Any]) -> None:
    call, given = cache_call(paged, seqlen_q, **options)
    assert compared(call, given, Direction.FORWARD) is None
    canary.counts.clear()
    shorter = replace(call.extras, cache_seqlens=call.extras.cache_seqlens - 5)
    computed = replace(call, extras=shorter)
    assert compared(call, given, Direction.FORWARD, computed=computed) is not None


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_8_bit_caches(by_token: bool, paged: bool, dtype: torch.dtype) -> None:
    call, (query, key, value) = cache_call(paged, 1)
    key, value = ((cache.nan_to_num(0.0).float() * 20).to(dtype) for cache in (key, value))
    sizes = (key.shape[0], key.shape[2], 2) if by_token else (1, 2)
    scales = {name: numbers(*sizes, seed=seed).abs() / 20 for name, seed in (("scale_k", 7), ("scale_v", 8))}
    call = replace(call, extras=replace(call.extras, **scales))
    assert compared(call, (query, key, value), Direction.FORWARD) is None
    canary.counts.clear()
    swapped = replace(call.extras, scale_k=scales["scale_v"], scale_v=scales["scale_k"])
    computed = replace(call, extras=swapped)
    assert compared(call, (query, key, value), Direction.FORWARD, computed=computed) is not None


def test_trees() -> None:
    words = torch.stack([tree_words((None, 0, 0, 1, 1))] * 4)
    call, given = cache_call(False, 5, tree_mask=words)
    assert compared(call, given, Direction.FORWARD) is None
    canary.counts.clear()
    other = torch.stack([tree_words((None, 0, 1, 2, 3))] * 4)
    computed = replace(call, extras=replace(call.extras, tree_mask=other))
    assert compared(call, given, Direction.FORWARD, computed=computed) is not None


# ---- what is not compared


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_numbers_that_are_not_finite_are_nobodys_fault(direction: Direction) -> None:
    query, key, value = tensors({}, torch.float16)
    query[0, 0, 11] = math.nan

    def spoil(*results: Tensor) -> None:
        for result in results:
            result.fill_(math.nan)

    trial_call = call_of({})
    shape = trial_call.shape(query, key, value, direction)
    trial = LaunchTrial.of(shape, query, key, value, trial_call, sums=True)
    rows = trial.rows()
    spoil(*trial.results[3:])
    assert trial.problem(CONFIG, rows) is None


def test_a_trial_without_the_calls_numbers_is_not_compared() -> None:
    given, call = tensors({}, torch.float16), call_of({})
    shape = call.shape(*given, Direction.FORWARD)
    trial = LaunchTrial.of(shape, *given, call, sums=True, compared=False)
    assert trial.rows() is None
    assert trial.problem(CONFIG, None) is None
    assert canary.counts == {}


def test_long_sequences_take_as_much_memory_as_short_ones() -> None:
    """Fewer rows are compared, and keys are widened part by part."""
    query, key, value = (torch.zeros(1, 1, 1 << 19, 1).half() for _ in range(3))
    call = call_of({})
    shape = call.shape(query, key, value, Direction.BACKWARD)
    sizes: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.dtype is torch.float64:
                sizes.append(found.untyped_storage().nbytes())
            return found

    with Watch():
        rows = row_sample.samples(shape, call.extras, query, key, value, 1.0)
    assert [len(sample.places) for sample in rows] == [2]
    assert max(sizes) <= 8 * row_sample.MOST_PAIRS


class ProductDevices(TorchDispatchMode):
    """Notes the devices of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.mm:
            self.found.add(args[0].device.type)
        return function(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize(("most", "device"), [(row_sample.MOST_ON_CPU, "cpu"), (0, "cuda")])
def test_a_gpu_multiplies_in_float64_for_long_sequences_alone(
    most: int, device: str, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first such product takes 0.3 s, in which cuBLAS is set up."""
    monkeypatch.setattr(row_sample, "MOST_ON_CPU", most)
    monkeypatch.setattr(canary, "_beside", lambda query, task: task())
    query, key, value = (tensor.cuda() for tensor in tensors({}, torch.bfloat16))
    call, watched = call_of({}), ProductDevices()
    trial = LaunchTrial.of(call.shape(query, key, value, direction), query, key, value, call, sums=True)
    with watched:
        rows = trial.rows()
        for result in trial.results[3:] if direction is Direction.FORWARD else trial.results[6:]:
            result.zero_()
        problem = trial.problem(CONFIG, rows)
    assert watched.found == {device}
    assert problem is not None  # nothing but zeros was computed
