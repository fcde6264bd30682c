"""The key of a call of an autotuned kernel: in a process a tuple that is quick to make, in the store a `LaunchProblem`.

Both hold the values of the arguments that `key` names, the data type of every tensor, and what Triton specialises the
code by: whether a pointer or a number divides by 16, and whether a number is 1. Other values do not count, as they do
not for `triton.autotune`.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import TYPES, UNSTORED, LaunchProblem, plain

Bucket = Callable[[Any], object]
"""Maps a key value to what stands for its group. Which type its argument takes is up to its author."""

MAX_TYPES_TEXT = 500
"""Characters of the types of all arguments; longer ones are known by their hash."""

_ALIGNMENT = 16
_KEY, _SPECIALISED, _OTHER = range(3)
_TOLD_BY_TYPE = (float, bool, str, type(None))
"""Types of which Triton specialises by no value."""

Pick = Callable[[Sequence[Any]], tuple[object, ...]]
"""Returns the key of a call from its positional and named values."""

_SHORT = {"bfloat": "bf", "float": "fp", "uint": "u", "int": "i"}


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is not below a size."""
    return 1 << max(0, value - 1).bit_length() if value > 0 else 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a jitted function as Triton knows it."""

    name: str
    is_constexpr: bool
    do_not_specialize: bool


class Descriptor(Protocol):
    """A tensor descriptor."""

    base: Tensor
    block_shape: Sequence[int]


class CallKey:
    """The key of calls of one kernel.

    Args:
        params: the parameters of the jitted function.
        keys: names of the arguments whose values count.
        buckets: groups of key values by name.
        sets_blocks: whether hooks of the configs give tensor descriptors their blocks, which then belong to a config
            and not to the call.
    """

    def __init__(
        self, params: Iterable[Parameter], keys: Sequence[str], buckets: Mapping[str, Bucket], sets_blocks: bool = False
    ) -> None:
        self._roles = {param.name: _role(param, keys) for param in params}
        self._buckets, self._blocks = dict(buckets), not sets_blocks
        self._names = tuple(self._roles)
        self._keys = tuple(name for name in keys if name in self._roles)
        self._picks: dict[tuple[object, ...], Pick] = {}
        self._kinds: dict[tuple[tuple[str, type], ...], int] = {}
        self._numbers = itertools.count()

    def quick(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
        """Return the key of a call in this process, of values as they are, grouped or not. Launches wait for it."""
        values = (*args, *kwargs.values())
        kinds = (*map(type, values), *kwargs)
        pick = self._picks.get(kinds)
        if pick is None:
            pick = self._picks[kinds] = self._pick(values, tuple(kwargs))
        return pick(values)

    def problem(self, args: Sequence[object], kwargs: Mapping[str, object]) -> LaunchProblem:
        """Return the key in the store of a call.

        Raises:
            UsageError: it is too long.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        values = {
            name: plain(self._bucketed(name, given[name]))
            for name in self._keys
            if name in given and not isinstance(given[name], Tensor)
        }
        counting = (name for name in self._names if name in given and _counts(self._roles[name], given[name]))
        types = " ".join(_type(given[name], self._blocks) for name in counting)
        if len(types) > MAX_TYPES_TEXT:
            types = hashlib.sha256(types.encode()).hexdigest()[:16]
        return LaunchProblem.of(values | {TYPES: types})

    def _pick(self, values: Sequence[object], names: Sequence[str]) -> Pick:
        """Return what makes the keys of calls with values of these types, the last of them under these names.

        It is compiled for them: a launch waits for it, and a loop over arguments takes three times as long. A number in
        front keeps apart what calls with other types have.
        """
        first = len(values) - len(names)
        places = dict(zip(self._names, range(first), strict=False))
        places |= {name: first + place for place, name in enumerate(names) if name in self._roles}
        kinds = {name: type(values[place]) for name, place in places.items()}
        number = self._kinds.setdefault(tuple(kinds.items()), next(self._numbers))
        parts = [_part(f"v[{place}]", kinds[name], self._roles[name]) for name, place in places.items()]
        tensors = [f"v[{place}]" for name, place in places.items() if issubclass(kinds[name], Tensor)]
        device = f"{tensors[0]}.get_device()" if tensors else ""
        lengths = " + ".join(f"{tensor}.numel().bit_length()" for tensor in tensors)  # a size that is far away differs
        source = ", ".join(part for part in (str(number), device, lengths, *parts, _alignment(tensors)) if part)
        made: Pick = eval(f"lambda v: ({source},)", {"hashable": _hashable, "kind": _kind, "blocks": self._blocks})
        return made

    def _bucketed(self, name: str, value: object) -> object:
        bucket = self._buckets.get(name)
        return value if bucket is None else bucket(value)


def unstored_problem(quick: tuple[object, ...]) -> LaunchProblem:
    """Return what stands for the problem of a call in this process, by its quick key."""
    return LaunchProblem.of({UNSTORED: hashlib.sha256(repr(quick).encode()).hexdigest()[:16]})


def require_sequence(what: str, names: object) -> None:
    """Require that names are given one by one: a text would be taken for its letters.

    Raises:
        UsageError: they are a text.
    """
    if isinstance(names, str):
        raise UsageError(f"`{what}` must be a sequence of names, but got the text {names!r}. Write [{names!r}].")


def require_names(what: str, names: Iterable[str], arg_names: Sequence[str], kernel: str) -> None:
    """Require that names are those of the kernel's arguments.

    Raises:
        UsageError: a name is not one of the kernel's arguments; such a key would never change.
    """
    unknown = [name for name in names if name not in arg_names]
    if unknown:
        raise UsageError(
            f"`{what}` names {', '.join(unknown)}, but {kernel} has no such argument. Its arguments are "
            f"{', '.join(arg_names)}."
        )


def _role(param: Parameter, keys: Sequence[str]) -> int:
    if param.name in keys:
        return _KEY
    return _OTHER if param.is_constexpr or param.do_not_specialize else _SPECIALISED


def _part(value: str, kind: type, role: int) -> str:
    """Return the expression of what a value adds to the key, next to its type; none where that is all."""
    if issubclass(kind, Tensor):
        return f"{value}.dtype"
    if role == _OTHER:
        return ""
    if role == _KEY:
        return value if kind is int else f"hashable({value})"
    if kind is int:
        return f"({value} % {_ALIGNMENT} == 0 or {value} == 1 and 2)"
    return "" if kind in _TOLD_BY_TYPE else f"kind({value}, blocks)"


def _alignment(tensors: Sequence[str]) -> str:
    """Return the expression of which tensors lie at an address that does not divide by 16: 0 where none does."""
    pointers = [f"{tensor}.data_ptr()" for tensor in tensors]
    each = ", ".join(f"{pointer} % {_ALIGNMENT} == 0" for pointer in pointers)
    return f"({' | '.join(pointers)}) % {_ALIGNMENT} and ({each},)" if pointers else ""


def _is_descriptor(value: object) -> TypeGuard[Descriptor]:
    return isinstance(getattr(value, "base", None), Tensor)


def _kind(value: object, blocks: bool) -> object:
    """Return the type of what is neither tensor nor integer, with the data type and block of a tensor descriptor."""
    if not _is_descriptor(value):
        return type(value)
    return (value.base.dtype, tuple(value.block_shape)) if blocks else (value.base.dtype,)


def _hashable(value: object) -> object:
    """Return the value, or its text where a dictionary cannot hold it."""
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value


def _counts(role: int, value: object) -> bool:
    """Return whether the type of an argument counts: that of every tensor, and of what Triton specialises by."""
    return role == _SPECIALISED or isinstance(value, Tensor)


def _type(value: object, blocks: bool) -> str:
    """Return a short word for the type of an argument: `bf16`, `bf16!` at an address that does not divide by 16, `/16`,
    `=1`, `i` for other numbers, `none`."""
    if isinstance(value, Tensor):
        return dtype_word(value) + ("" if value.data_ptr() % _ALIGNMENT == 0 else "!")
    if _is_descriptor(value):
        return dtype_word(value.base) + "d" + "x".join(str(size) for size in value.block_shape if blocks)
    if type(value) is not int:
        return "none" if value is None else type(value).__name__
    return "=1" if value == 1 else "/16" if value % _ALIGNMENT == 0 else "i"


def dtype_word(tensor: Tensor) -> str:
    """Return Triton's word for a tensor's data type, such as `bf16`; `i1` for `bool`, which is the word of a number."""
    name = str(tensor.dtype).removeprefix("torch.").replace("bool", "int1")
    for long, short in _SHORT.items():
        if name.startswith(long) and name[len(long) :].isdigit():
            return short + name[len(long) :]
    return name
