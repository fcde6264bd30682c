"""Eager calls, captured graphs and compiled graphs compute the same, by whichever way each of them goes: drawn calls
against attention in float64, with other values at the replay than at the capture."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.dispatch.dispatcher import Dispatcher
from tests.support.fakes.dispatch_fakes import ListSource

pytestmark = pytest.mark.gpu

BOUND = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Relative Frobenius error."""

Results = tuple[Tensor, ...]
"""The output, and gradients if there are any."""


@dataclass
class Case:
    """A drawn call: `memories` are query, key, value, the gradient of the output and the mask, if there is one."""

    memories: list[Tensor]
    options: dict[str, Any]
    gradients: bool

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        dice = random.Random(seed)
        torch.manual_seed(seed)
        dtype = dice.choice([torch.bfloat16, torch.float16])
        heads_kv, group, batch = dice.choice([1, 2, 5]), dice.choice([1, 4]), dice.choice([1, 2, 3])
        rows, keys, dim = dice.choice([1, 64, 300, 777]), dice.choice([64, 512, 777]), dice.choice([64, 96, 128])
        sizes = [(heads_kv * group, rows), (heads_kv, keys), (heads_kv, keys), (heads_kv * group, rows)]
        memories = [torch.randn(batch, *own, dim, dtype=dtype, device="cuda") for own in sizes]
        shared = [dice.choice([1, size]) for size in (batch, heads_kv * group, rows)]
        mask = torch.rand(*shared, keys, device="cuda") > 0.4
        mask[..., 0] = True  # each row sees a key
        kind = dice.choice(["none", "boolean", "boolean", "additive"])
        if kind != "none":
            bias = torch.where(mask, torch.randn(mask.shape, device="cuda"), float("-inf")).to(dtype)
            memories.append(mask if kind == "boolean" else bias)
        options = {"scale": dice.choice([None, 0.0, -0.1, 0.2]), "enable_gqa": group > 1}
        options |= {"is_causal": dice.choice([False, True])} if kind == "none" else {}
        return cls(memories, options, dice.choice([False, True]))

    def call(self, attend: Callable[..., Tensor], memories: Sequence[Tensor]) -> Results:
        query, key, value, grad, *mask = memories
        leaves = [tensor.detach().requires_grad_(self.gradients) for tensor in (query, key, value)]
        out = attend(*leaves, *mask, **self.options)
        return (out, *torch.autograd.grad(out, leaves, grad)) if self.gradients else (out,)

    def right(self) -> Results:
        """Return the results in float64, where the causal mask is a tensor: with PyTorch's own, a scale that is not
        positive gives NaN."""
        doubles = [one.double() if one.is_floating_point() else one for one in self.memories]
        query, key = doubles[:2]
        if self.options.get("is_causal"):
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            doubles.append(seen.tril())
        return Case(doubles, self.options | {"is_causal": False}, self.gradients).call(
            scaled_dot_product_attention, doubles
        )

    def with_other_values(self) -> list[Tensor]:
        """Return memories of the same kinds."""
        return [one.flip(-1) if one.is_floating_point() else torch.ones_like(one) for one in self.memories]


def captured(case: Case, attend: Callable[..., Tensor], calls_before: int) -> Results:
    """What a replay computes of the case's values, where there were others when the graph was captured."""
    memories = case.with_other_values()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(calls_before):
            case.call(attend, memories)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.call(attend, memories)
    for memory, value in zip(memories, case.memories, strict=True):
        memory.copy_(value)
    graph.replay()
    return tuple(result.detach().clone() for result in results)


def assert_right(found: Results, right: Results, bound: float, what: str) -> None:
    for number, (one, other) in enumerate(zip(found, right, strict=True)):
        size = max(other.norm(), right[0].norm() * 1e-2)  # a gradient may be 0
        assert (one.detach().double() - other.detach()).norm() <= bound * size, f"{what}: result {number}"


@pytest.mark.parametrize("seed", range(60))
def test_they_compute_the_same(seed: int) -> None:
    case, dispatcher = Case.drawn(seed), Dispatcher(ListSource())
    right, bound = case.right(), BOUND[case.memories[0].dtype]
    for number in range(2):
        assert_right(case.call(dispatcher, case.memories), right, bound, f"eager call {number}")
    for calls_before in (1, 5):  # the ordinary way is captured, or the repeated one
        what = f"captured after {calls_before} calls"
        assert_right(captured(case, dispatcher, calls_before), right, bound, what)
    if seed % 4 == 0:  # a graph takes seconds to compile
        torch._dynamo.reset()
        attend = torch.compile(lambda *tensors, **options: dispatcher(*tensors, **options))
        assert_right(case.call(attend, case.memories), right, bound, "compiled")


@pytest.mark.parametrize("scale", [0.0, -0.1])
@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "rows", "dim", "dtype", "sizes"),
    [
        (3, 40, 8, 777, 96, torch.float16, (3, 1, 1, 777)),
        (2, 8, 2, 512, 64, torch.bfloat16, (2, 1, 512, 512)),
    ],
)
def test_a_boolean_mask_with_a_scale_that_is_not_positive(
    batch: int, heads: int, heads_kv: int, rows: int, dim: int, dtype: torch.dtype, sizes: tuple[int, ...], scale: float
) -> None:
    torch.manual_seed(0)
    memories = [
        torch.randn(batch, own, rows, dim, dtype=dtype, device="cuda") for own in (heads, heads_kv, heads_kv, heads)
    ]
    case = Case([*memories, torch.rand(sizes, device="cuda") > 0.4], {"scale": scale, "enable_gqa": True}, False)
    assert_right(captured(case, Dispatcher(ListSource()), 1), case.right(), BOUND[dtype], "captured")


def test_the_first_call_of_a_stream_with_a_mask() -> None:
    """The counter of a launch is allocated then, between its two kernels."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 512, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    case = Case([*tensors, torch.rand(2, 1, 1, 512, device="cuda") > 0.4], {"scale": -0.1}, False)
    dispatcher, right = Dispatcher(ListSource()), case.right()
    case.call(dispatcher, case.memories)
    for _ in range(8):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = case.call(dispatcher, case.memories)
        torch.cuda.synchronize()
        assert_right(found, right, BOUND[torch.bfloat16], "on a new stream")
