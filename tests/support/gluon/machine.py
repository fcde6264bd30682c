"""Runs a warp-specialised Gluon kernel for Hopper on the CPU: its own source, with stand-ins for what the GPU does.

Triton's interpreter does not know Gluon. Here every `gluon.jit` function runs as the Python that it is, warp partitions
as threads, and the words of the language as these stand-ins:

- mbarriers count arrivals and bytes and have phases; too many arrivals, wrong byte counts and waits of more than
  `barriers.PATIENCE` seconds are errors, so that a kernel that would hang fails.
- Asynchronous work happens as late as it may: a matrix product reads shared memory when it is waited for, a copy to
  global memory when it is waited for. Memory that is given back too early is overwritten by then.
- The copy engine computes addresses as the hardware does, with 64-bit wraparound, fills with zeros and clips.
- Shared memory is a row of panels of one swizzle width, as TMA and wgmma lay tiles out; the swizzle itself, register
  layouts, fences and everything else that the compiler does are not modelled.
"""

import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as real

from tests.support.gluon import barriers
from tests.support.gluon.barriers import Barrier, Barriers
from tests.support.gluon.memory import F32, I32, Descriptor, Memory, Pointer, Transposed, count, reinterpret
from tests.support.gluon.partitions import GRID, PARTITION, warp_specialize
from tests.support.gluon.rows import ROWS

_atomic = threading.Lock()
_turns = threading.Condition()


class Product:
    """A matrix product in flight: operands are read when it is waited for."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: bool) -> None:
        self.operands, self.acc, self.use_acc = (a, b), acc, use_acc
        self.value: torch.Tensor | None = None
        self.shape = acc.shape

    def finish(self) -> None:
        a, b = (found.load() if isinstance(found, Memory | Transposed) else found for found in self.operands)
        before = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = accumulated(before if self.use_acc else torch.zeros(before.shape), a.float(), b.float())


def accumulated(before: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A matrix product added to an accumulator, without the errors of 8-bit products."""
    return before + a @ b


def warpgroup_mma(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, acc, use_acc)
    PARTITION.products.append(product.finish)
    return product


def warpgroup_mma_wait(pending: int, deps: Sequence[Any]) -> Any:
    while len(PARTITION.products) > pending:
        PARTITION.products.pop(0)()
    values = tuple(dep.value if isinstance(dep, Product) else dep for dep in deps)
    assert all(value is not None for value in values), "a result is used before it is waited for"
    return values[0] if len(values) == 1 else values


def copy_in(desc: Descriptor, coordinates: Sequence[int], barrier: Barrier, memory: Memory) -> None:
    seen, inside = desc.box(coordinates)
    block = torch.zeros(desc.block_type.shape[-len(seen) :], dtype=desc.dtype)
    block[seen] = inside
    memory.store(block)
    barrier.update(0, -desc.block_type.nbytes)


def copy_out(desc: Descriptor, coordinates: Sequence[int], memory: Memory) -> None:
    seen, inside = desc.box(coordinates)

    def store() -> None:
        inside.copy_(memory.load()[seen])

    PARTITION.stores.append(store)


def add_out(desc: Descriptor, coordinates: Sequence[int], memory: Memory) -> None:
    seen, inside = desc.box(coordinates)

    def add() -> None:
        with _atomic:
            inside.add_(memory.load()[seen])

    PARTITION.stores.append(add)


def add_fours(places: Pointer, *numbers: torch.Tensor) -> None:
    with _atomic:
        memory = places.tensor.view(-1)
        for behind, added in enumerate(numbers):
            memory[places.offset + behind] += added


def await_turn(turn: Pointer, wanted: int) -> None:
    with _turns:
        found = turn.tensor.view(-1)
        if not _turns.wait_for(lambda: wanted < 0 or found[turn.offset] == wanted, barriers.PATIENCE):
            raise TimeoutError("a turn never came: the kernel would hang")


def pass_turn(turn: Pointer, count: int) -> None:
    store_wait(0)
    with _turns:
        if count >= 0:
            turn.tensor.view(-1)[turn.offset] += PARTITION.threads // 32  # an elected lane of every warp counts
            _turns.notify_all()


def report_added(parity: int, given: int) -> None:
    if given:
        store_wait(0)
        GRID.meetings[14 + int(parity)].arrive(288)


def store_wait(pending: int) -> None:
    while len(PARTITION.stores) > pending:
        PARTITION.stores.pop(0)()


def atomic_add(pointer: Pointer, value: int, sem: str = "") -> I32:
    del sem
    with _atomic:
        before = I32(pointer.tensor[pointer.offset])
        pointer.tensor[pointer.offset] += value
    return before


def atomic_xchg(pointer: Pointer, value: int) -> None:
    pointer.tensor[pointer.offset] = value


def load(pointer: Pointer, mask: Any = True, other: int = 0) -> Any:
    if isinstance(mask, bool) and not mask:
        return I32(other)
    if isinstance(pointer.offset, torch.Tensor):
        return pointer.tensor.view(-1)[pointer.offset.long()]
    assert 0 <= pointer.offset < pointer.tensor.numel()
    found = pointer.tensor.view(-1)[pointer.offset].item()
    return F32(found) if isinstance(found, float) else I32(found)


def store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    flat = pointer.tensor.view(-1)
    flat[pointer.offset[mask]] = value[mask]


def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if dtype is real.int64:
        return Barrier() if len(shape) == 1 else Barriers(Barrier() for _ in range(shape[0]))
    if dtype is real.int32:
        return Memory(torch.zeros(count(shape), dtype=torch.int32), shape, layout)
    return Memory(torch.full((count(shape),), float("nan"), dtype=dtype), shape, layout)


class Registers(torch.Tensor):
    """A tensor whose layout a kernel may ask for."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with plain tensors, and return what PyTorch's own returns: it looks at far more, at every call."""
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            return found.as_subclass(cls)
        if type(found) in (tuple, list):
            return type(found)(each.as_subclass(cls) if isinstance(each, torch.Tensor) else each for each in found)
        return found


def prefetch(place: Pointer, nbytes: int) -> None:
    """Copies nothing, as there is no L2; what a kernel asks for must lie in the tensor."""
    first = int(place.offset) * place.tensor.element_size()
    assert 0 <= first <= first + nbytes <= place.tensor.untyped_storage().nbytes()


def _both(smaller: bool) -> Callable[[Any, Any], Any]:
    def choose(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return I32(min(a, b) if smaller else max(a, b))
        a, b = (torch.as_tensor(value) for value in (a, b))
        return torch.minimum(a, b) if smaller else torch.maximum(a, b)

    return choose


def _where(condition: Any, a: Any, b: Any) -> Any:
    if all(isinstance(value, int) for value in (condition, a, b)):
        return I32(a if condition else b)
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))


GL = types.SimpleNamespace(
    **{name: getattr(real, name) for name in ("int32", "int64", "constexpr", "SliceLayout", "BlockedLayout")},
    **{name: getattr(real, name) for name in ("DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout")},
    SwizzledSharedLayout=real.SwizzledSharedLayout,
    zeros=lambda shape, dtype, layout: torch.zeros(shape).as_subclass(Registers),
    full=lambda shape, value, dtype, layout: torch.full(
        shape, value, dtype=torch.int32 if dtype is real.int32 else dtype
    ),
    arange=lambda start, stop, layout: torch.arange(start, stop, dtype=torch.int32),
    minimum=_both(smaller=True),
    maximum=_both(smaller=False),
    where=_where,
    exp2=torch.exp2,
    log2=torch.log2,
    max=lambda x, axis: torch.amax(x, axis),
    sum=lambda x, axis: torch.sum(x, axis),
    reduce=lambda x, axis, combined: functools.reduce(combined, x.unbind(axis)),
    reshape=torch.reshape,
    expand_dims=torch.unsqueeze,
    broadcast=torch.broadcast_tensors,
    permute=torch.permute,
    split=lambda x: x.as_subclass(Registers).unbind(-1),
    join=lambda a, b: torch.stack((a, b), -1),
    uint8=torch.uint8,
    int16=torch.int16,
    bfloat16=torch.bfloat16,
    float32=torch.float32,
    abs=torch.abs,
    convert_layout=lambda x, layout: x,
    to_tensor=I32,
    load=load,
    store=store,
    atomic_add=atomic_add,
    atomic_xchg=atomic_xchg,
    num_warps=lambda: 4,  # decides a layout alone, of which this machine has none
    program_id=lambda axis: I32(GRID.program),
    num_programs=lambda axis: I32(GRID.programs),
    static_range=range,
    static_assert=lambda condition: None,
    allocate_shared_memory=allocate_shared_memory,
    warp_specialize=warp_specialize,
)
MBARRIER = types.SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: barrier.init(count),
    wait=lambda barrier, parity, pred=True: barrier.wait(parity) if pred else None,
    arrive=lambda barrier, count, pred=True: barrier.update(count, 0) if pred else None,
    expect=lambda barrier, nbytes: barrier.update(1, nbytes),
)


STAND_INS: dict[str, Any] = {
    "gl": GL,
    "mbarrier": MBARRIER,
    "tma": types.SimpleNamespace(store_wait=store_wait),
    "fence_async_shared": lambda: None,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "copy_in": copy_in,
    "copy_out": copy_out,
    "add_out": add_out,
    "add_fours": add_fours,
    "await_turn": await_turn,
    "pass_turn": pass_turn,
    "report_added": report_added,
    "give_values": lambda left: GRID.meetings[15].arrive(288) if int(left) == 1 else None,
    "bar_arrive": lambda number, threads: GRID.meetings[int(number)].arrive(threads),
    "bar_sync": lambda number, threads: GRID.meetings[int(number)].sync(threads),
    "await_pass": lambda: None,
    "unit_layout": lambda pairs: None,
    "turned_layout": lambda dims: None,  # rows in their order
    "settle_products": lambda: None,
    "hidden_zero": lambda: 0,
    "reinterpret": reinterpret,
    "is_within": lambda distances, count: (distances >= 0) & (distances < count),
    "prefetch": prefetch,
    "pin": lambda x: x,
    "pin_pairs": lambda x: x,
    "tanh": torch.tanh,
    "as_numbers": lambda numbers, dtype: numbers.view(dtype),
    "meet": lambda: None,
    "loaded_as": lambda memory, x: memory.load(),
    **ROWS,
}
"""By the names under which kernels know them: the language, and functions that are assembly or registers."""


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, real.constexpr) else value


def as_python(function: Any, stand_ins: Mapping[str, Any] = STAND_INS) -> Any:
    """A `gluon.jit` function as Python, with all that it calls."""
    return _as_python(function, stand_ins, {})


def _as_python(function: Any, stand_ins: Mapping[str, Any], done: dict[int, Any]) -> Any:
    if id(function) in done:
        return done[id(function)]
    python = function.fn
    words = {name: _plain(value) for name, value in python.__globals__.items()}
    made = done[id(function)] = types.FunctionType(python.__code__, words, python.__name__, python.__defaults__)
    for name in python.__code__.co_names:
        found = python.__globals__.get(name)
        if name in stand_ins:
            words[name] = stand_ins[name]
        elif hasattr(found, "fn") and isinstance(found.fn, types.FunctionType):
            words[name] = _as_python(found, stand_ins, done)
    return made


def run(kernel: Any, arguments: Sequence[Any], programs: int, *, together: bool = False) -> None:
    """Runs all programs of a launch, one after another or together.

    arguments: as the jitted kernel takes them, with tensors of the CPU and descriptors of the host.
    """
    made = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            made.append(Pointer(value))
        elif hasattr(value, "block_shape"):
            made.append(Descriptor(value))
        else:
            made.append(I32(value) if type(value) is int else value)
    function = as_python(kernel)
    failures: list[BaseException] = []

    def run_one(program: int) -> None:
        GRID.program, GRID.programs = program, programs
        try:
            function(*made)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run_one, args=(program,)) for program in range(programs)]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    if failures:
        raise min(failures, key=lambda error: isinstance(error, TimeoutError))
