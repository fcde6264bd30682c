"""The fast path: the second call of a kind takes it, and nothing of another kind does."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.runtime.api.block_sparse import block_sparse_attention
from blocktune.runtime.api.flash_attn import flash_attn_func
from blocktune.runtime.dispatch import fast_path
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.launches import guards, plans
from blocktune.runtime.dispatch.sdpa_arguments import mask_of_scores
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.fakes.feature_fakes import FeatureBackward, FeatureForward, pretend_features

pytestmark = pytest.mark.triton_free

Kernels = tuple[FeatureForward, FeatureBackward]
Make = Callable[[], list[Tensor]]
Attend = Callable[..., Tensor]
HEADS, QUERIES, KEYS = 4, 20, 24


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return pretend_features(monkeypatch)


def three(*, grad: bool = False, queries: int = QUERIES, length_first: bool = False) -> list[Tensor]:
    sizes = [(2, HEADS, queries, 16), (2, HEADS, KEYS, 16), (2, HEADS, KEYS, 16)]
    if length_first:
        sizes = [(batch, length, heads, dim) for batch, heads, length, dim in sizes]
    return [torch.randn(size, requires_grad=grad) for size in sizes]


def square(*, grad: bool) -> list[Tensor]:
    return [torch.randn(2, KEYS, HEADS, 16, requires_grad=grad) for _ in range(3)]


def mask() -> Tensor:
    return torch.rand(2, 1, QUERIES, KEYS) > 0.3


def with_mask(dispatcher: Dispatcher) -> Attend:
    return lambda q, k, v, m: dispatcher(q, k, v, m)


def flash(dispatcher: Dispatcher, **options: Any) -> Attend:
    return lambda q, k, v, *slopes: flash_attn_func(
        q, k, v, alibi_slopes=slopes[0] if slopes else None, dispatcher=dispatcher, **options
    )


CALLS: dict[str, tuple[Callable[[Dispatcher], Attend], Make]] = {
    "gradients": (lambda own: own, lambda: three(grad=True)),
    "mask": (with_mask, lambda: [*three(), mask()]),
    "mask with gradients": (with_mask, lambda: [*three(grad=True), mask()]),
    "row of a mask": (with_mask, lambda: [*three(), torch.rand(1, KEYS) > 0.3]),
    "dropout": (lambda own: lambda *leaves: own(*leaves, dropout_p=0.25), three),
    "plain rows": (flash, lambda: three(length_first=True)),
    "plain rows with gradients": (lambda own: flash(own, causal=True), lambda: square(grad=True)),
    "window": (lambda own: flash(own, window_size=[5, 2]), lambda: three(length_first=True)),
    "soft cap with gradients": (lambda own: flash(own, softcap=9.0), lambda: three(length_first=True, grad=True)),
    "slopes": (flash, lambda: [*three(length_first=True), torch.rand(HEADS)]),
}


def no_call(*_: Any, **__: Any) -> None:
    raise AssertionError("a call of a known kind took the long way")


def gradients_of(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients where there are any."""
    torch.manual_seed(3)
    out = attend(*tensors)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out, leaves, torch.ones_like(out)) if leaves else ())]


def test_rows_that_pytorch_computes_take_the_short_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, tensors = Dispatcher(ListSource()), three(length_first=True)  # on the CPU
    wanted = flash(dispatcher)(*tensors)
    monkeypatch.setattr(dispatcher, "rows", no_call)
    torch.testing.assert_close(flash(dispatcher)(*tensors), wanted)


@pytest.mark.parametrize("kind", CALLS)
def test_the_second_call_of_a_kind_computes_the_same_without_a_look_up(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    bind, make = CALLS[kind]
    dispatcher, second = Dispatcher(ListSource()), make()
    long = bind(Dispatcher(ListSource()))
    bind(dispatcher)(*make())
    wanted = gradients_of(long, second)
    monkeypatch.setattr(Call, "of", no_call)
    monkeypatch.setattr(Call, "plan_key", no_call)
    torch.testing.assert_close(gradients_of(bind(dispatcher), second), wanted)
    assert (kernels[0].seen[-1][1].mask is not None) == ("mask" in kind)


Known = tuple[Dispatcher, Callable[..., Any], list[Tensor]]


@pytest.fixture
def known(kernels: Kernels) -> Known:
    """A dispatcher that has served a masked call, a look-up by other tensors, and the tensors."""
    dispatcher, tensors = Dispatcher(ListSource()), [*three(), mask()]
    dispatcher(*tensors)
    (options,) = dispatcher._resolver.fast_path._guarded

    def look_up(*others: Tensor | None) -> Any:
        return dispatcher.find_call(options, *others)

    assert look_up(*tensors) is not None
    return dispatcher, look_up, tensors


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.to(torch.complex64),
        lambda tensor: tensor[:1].clone(),
        lambda tensor: tensor.mT.contiguous().mT,
        lambda tensor: tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape),
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor.to("meta"),
        lambda tensor: None,
    ],
    ids=["dtype", "size", "strides", "address", "type", "layout", "device", "missing"],
)
def test_what_a_plan_relies_on_is_looked_at_in_every_tensor(
    known: Known, place: int, change: Callable[[Tensor], Tensor | None]
) -> None:
    _, look_up, tensors = known
    changed: list[Tensor | None] = list(tensors)
    changed[place] = change(tensors[place])
    assert look_up(*changed) is None
    assert look_up(*tensors) is not None


def test_gradients_count_where_they_are_recorded(known: Known) -> None:
    dispatcher, look_up, tensors = known
    tensors[0].requires_grad_()
    assert look_up(*tensors) is None
    assert dispatcher(*tensors).requires_grad
    with torch.no_grad():
        assert look_up(*tensors) is None  # a way of its own: guards do not see the mode
        assert not dispatcher(*tensors).requires_grad
    assert dispatcher(*tensors).requires_grad


@pytest.mark.parametrize(
    "state",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: FakeTensorMode(),
        lambda: torch.autograd.forward_ad.dual_level(),
        lambda: FlopCounterMode(display=False),
    ],
)
def test_a_state_of_pytorch_is_looked_at_in_every_call(
    known: Known, state: Callable[[], AbstractContextManager[Any]]
) -> None:
    _, look_up, tensors = known
    with state():
        assert look_up(*tensors) is None
    assert look_up(*tensors) is not None


def test_transforms_are_looked_at_in_every_call(known: Known) -> None:
    _, look_up, tensors = known
    seen: list[Any] = []
    torch.vmap(lambda one: seen.append(look_up(*tensors)) or one)(torch.zeros(2))
    assert seen == [None]


def test_deterministic_gradients_have_ways_of_their_own(kernels: Kernels) -> None:
    dispatcher, leaves = Dispatcher(ListSource()), three(grad=True)
    dispatcher(*leaves)
    (options,) = dispatcher.resolver.fast_path._guarded
    torch.use_deterministic_algorithms(True)
    try:
        assert dispatcher.find_call(options, *leaves) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert dispatcher.find_call(options, *leaves) is not None


def test_another_precision_has_ways_of_its_own(known: Known) -> None:
    _, look_up, tensors = known
    torch.set_float32_matmul_precision("high")
    try:
        assert look_up(*tensors) is None
    finally:
        torch.set_float32_matmul_precision("highest")
    assert look_up(*tensors) is not None


def test_what_was_read_again_forgets_the_ways(known: Known) -> None:
    dispatcher, look_up, tensors = known
    dispatcher.reload()
    assert look_up(*tensors) is None


def test_a_tensor_in_two_places_is_another_kind_than_two_tensors(kernels: Kernels) -> None:
    dispatcher, (query, key, value) = Dispatcher(ListSource()), three(grad=True)
    for _ in range(2):
        for leaves in ([query, key, value], [query, key, key]):
            torch.testing.assert_close(dispatcher(*leaves), sdpa(*leaves))
    assert len(dispatcher._resolver.fast_path) == 2


def test_values_of_a_mask_are_those_of_the_call(kernels: Kernels) -> None:
    dispatcher, leaves = Dispatcher(ListSource()), three(grad=True)
    for _ in range(3):
        seen = mask()
        torch.testing.assert_close(
            gradients_of(with_mask(dispatcher), [*leaves, seen]),
            gradients_of(lambda q, k, v, m: sdpa(q, k, v, m), [*leaves, seen]),
        )
    assert len(dispatcher._resolver.fast_path) == 1


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_masked_calls_of_pytorch_take_the_fast_path(
    grad: bool, additive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has no kernels of ours. The values of each call's mask count, finite numbers that hide a row, too."""
    dispatcher, masks = Dispatcher(ListSource()), [mask() for _ in range(3)]
    if additive:
        masks = [torch.zeros(one.shape).masked_fill(~one, -1e30) for one in masks]
        masks[1][:, :, 0] = -1e30
    dispatcher(*three(grad=grad), masks[0])
    monkeypatch.setattr(dispatcher, "_call_slowly", no_call)
    for one in masks:
        tensors = [*three(grad=grad), one]
        with sdpa_kernel(SDPBackend.MATH):
            wanted = gradients_of(lambda q, k, v, m: sdpa(q, k, v, m), tensors)
        torch.testing.assert_close(gradients_of(with_mask(dispatcher), tensors), wanted)


def test_pytorchs_products_are_prepared_in_captures_that_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, tensors = Dispatcher(ListSource()), [*three(), mask()]
    prepared: list[torch.device] = []
    monkeypatch.setattr(plans, "prepare_blas", prepared.append)
    dispatcher(*tensors)
    assert not prepared
    monkeypatch.setattr(plans, "is_capturing", lambda query: True)
    monkeypatch.setattr(dispatcher, "_call_slowly", no_call)
    dispatcher(*tensors)
    assert prepared == [tensors[0].device]


def test_tensors_of_a_call_are_not_kept(kernels: Kernels) -> None:
    dispatcher, leaves, seen = Dispatcher(ListSource()), three(grad=True), mask()
    dispatcher(*leaves, seen)
    for kernel in kernels:
        kernel.seen.clear()
    forgotten = [weakref.ref(tensor) for tensor in (*leaves, seen)]
    del leaves, seen
    gc.collect()
    assert [reference() for reference in forgotten] == [None] * 4
    assert len(dispatcher._resolver.fast_path) == 1


def test_a_block_mask_is_the_one_of_the_call(kernels: Kernels) -> None:
    dispatcher, leaves = Dispatcher(ListSource()), three(grad=True, queries=32)
    for keys in ([[True, False], [True, True]], [[True, True], [False, True]]):
        blocks = BlockMask(16, 16, torch.tensor(keys)[None, None])
        dense = blocks.to_dense(32, KEYS)
        got = gradients_of(lambda q, k, v, m=blocks: block_sparse_attention(q, k, v, m, dispatcher=dispatcher), leaves)
        torch.testing.assert_close(got, gradients_of(lambda q, k, v, m=dense: sdpa(q, k, v, m), leaves))
    assert len(dispatcher._resolver.fast_path) == 1


def test_dropout_draws_other_pairs_in_every_call_and_the_same_after_the_same_seed(kernels: Kernels) -> None:
    dispatcher, leaves = Dispatcher(ListSource()), three()
    dispatcher(*leaves, dropout_p=0.5)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results += [dispatcher(*leaves, dropout_p=0.5) for _ in range(2)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])


def test_a_number_in_a_tensor_may_change_and_has_no_way(kernels: Kernels) -> None:
    dispatcher, leaves, cap = Dispatcher(ListSource()), three(length_first=True), torch.tensor(5.0)
    for value in (5.0, 1.0):
        cap.fill_(value)
        torch.testing.assert_close(
            flash_attn_func(*leaves, softcap=cap, dispatcher=dispatcher),
            flash_attn_func(*leaves, softcap=value, dispatcher=Dispatcher(ListSource())),
        )
    assert len(dispatcher._resolver.fast_path) == 0


def test_a_scale_that_is_not_positive_has_no_way(kernels: Kernels) -> None:
    dispatcher, leaves, seen = Dispatcher(ListSource()), three(), mask()
    for _ in range(2):
        torch.testing.assert_close(dispatcher(*leaves, seen, scale=-0.3), sdpa(*leaves, seen, scale=-0.3))
    assert len(dispatcher._resolver.fast_path) == 0


def test_one_is_not_true(kernels: Kernels) -> None:
    dispatcher, leaves, wrong = Dispatcher(ListSource()), three(grad=True), 1
    dispatcher(*leaves, is_causal=True)
    with pytest.raises(TypeError):
        dispatcher(*leaves, is_causal=wrong)


def test_ways_do_not_pile_up(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "MAX_ENTRIES", 3)
    dispatcher = Dispatcher(ListSource())
    for width in range(2, 12):
        dispatcher(*three(), scale=width / 10, attn_mask=mask())
        dispatcher(*three(queries=width), torch.rand(width, KEYS) > 0.2)
        assert len(dispatcher._resolver.fast_path) <= 3


def test_without_guards_ways_are_found_as_well(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_guards", lambda: None)
    dispatcher, leaves, seen = Dispatcher(ListSource()), three(), mask()
    dispatcher(*leaves, seen)
    monkeypatch.setattr(Call, "of", no_call)
    torch.testing.assert_close(dispatcher(*leaves, seen), sdpa(*leaves, seen))


def test_threads_share_the_ways(kernels: Kernels) -> None:
    dispatcher, wrong = Dispatcher(ListSource()), []

    def work(queries: int) -> None:
        leaves, seen = three(queries=queries), torch.rand(queries, KEYS) > 0.2
        for _ in range(20):
            if not torch.allclose(dispatcher(*leaves, seen), sdpa(*leaves, seen), atol=1e-5):
                wrong.append(queries)

    threads = [threading.Thread(target=work, args=(queries,)) for queries in (8, 9, 10, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("causal", [False, True])
def test_a_checkpoint_of_plain_rows_finds_the_tensors_of_the_first_call(kernels: Kernels, causal: bool) -> None:
    """The first call of a kind and those by the fast path save tensors of the same sizes."""
    dispatcher, leaves = Dispatcher(ListSource()), square(grad=True)
    dispatcher(*(leaf.transpose(1, 2) for leaf in leaves), is_causal=causal)  # resolves the plans
    attend = flash(dispatcher, causal=causal)
    out = checkpoint(attend, *leaves, use_reentrant=False)
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.testing.assert_close(list(found), gradients_of(flash(Dispatcher(ListSource()), causal=causal), leaves)[1:])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1, 1, 1), (QUERIES, 1)])
def test_a_checkpoint_finds_the_mask_that_all_keys_share(sizes: tuple[int, ...]) -> None:
    dispatcher, leaves, mask = Dispatcher(ListSource()), three(grad=True), torch.randn(sizes)
    dispatcher(*leaves, mask_of_scores(mask, KEYS))  # resolves the plans
    out = checkpoint(dispatcher, *leaves, mask, use_reentrant=False)
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    wanted = torch.autograd.grad(sdpa(*leaves, mask), leaves, torch.ones_like(out))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
