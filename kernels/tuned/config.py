"""What users' own kernels are tuned for and with: a problem is the arguments of a call, a config its parameters."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Any, Self

from blocktune.kernels.values.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
MAX_VALUE = 1 << 20
MAX_PROBLEM_TEXT = 1000
MAX_CONFIG_TEXT = 1000

Plain = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class UserConfig:
    """The parameters of one launch of a tuned function, in the order of their names.

    Raises:
        UsageError: a name is not valid in Python, or a value is no integer that a kernel could take.
    """

    kernel: str
    values: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, value in self.values:
            if not isinstance(name, str) or not _NAME.fullmatch(name) or type(value) is not int:
                raise UsageError(f"A parameter is a name and an integer, but got {name!r}={value!r}.")
            if abs(value) > MAX_VALUE:
                raise UsageError(f"A parameter is at most {MAX_VALUE}, but got {name}={value}.")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    @property
    def parameters(self) -> dict[str, int]:
        return dict(self.values)

    @property
    def label(self) -> str:
        """A short name for people, such as `softmax block=1024 num_warps=8`."""
        return " ".join([self.kernel.rpartition(":")[2], *(f"{name}={value}" for name, value in self.values)])

    @property
    def document(self) -> str:
        """The parameters as canonical JSON text."""
        return json.dumps(self.parameters, sort_keys=True, separators=(",", ":"))

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "parameters": self.parameters}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The config that `to_json` wrote.

        Raises:
            UsageError: a value is missing or out of range.
        """
        kernel, parameters = data.get("kernel"), data.get("parameters")
        if not isinstance(kernel, str) or not isinstance(parameters, dict):
            raise UsageError(f"A config is an object with `kernel` and `parameters`, but got {data!r:.200}.")
        return cls(kernel, tuple(parameters.items()))

    @classmethod
    def from_document(cls, kernel: str, text: str) -> Self:
        """Return the config of a function with this document.

        Raises:
            UsageError: the text is invalid.
        """
        return cls.from_json({"kernel": kernel, "parameters": _loaded(text, MAX_CONFIG_TEXT)})


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What code and speed depend on of a tensor. strides count elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def label(self) -> str:
        dense = self.strides == _dense(self.shape)
        return f"{self.dtype}{list(self.shape)}" + ("" if dense else f" strides {list(self.strides)}")

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the outermost to the innermost, which neighbours have in common."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim]))


@dataclass(frozen=True, slots=True)
class Problem:
    """The arguments of one call by name: kinds of tensors, and plain values as they are.

    Raises:
        UsageError: an argument is neither, or there are too many to be a key.
    """

    arguments: tuple[tuple[str, TensorKind | Plain], ...]

    def __post_init__(self) -> None:
        if len(self.document) > MAX_PROBLEM_TEXT:
            raise UsageError(
                f"The arguments of a tuned function are known by up to {MAX_PROBLEM_TEXT} characters, but these take "
                f"{len(self.document)}: {self.document:.80}... Pass fewer, or shorter texts."
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The problem of bound arguments, which are kept in the order of their names."""
        return cls(tuple((name, _kind(name, arguments[name])) for name in sorted(arguments)))

    @property
    def document(self) -> str:
        """Canonical JSON text: equal problems, equal text."""
        plain = {name: _json(value) for name, value in self.arguments}
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))

    @property
    def label(self) -> str:
        """A short name for people, such as `x=float32[4096, 1024] causal=True`."""
        return " ".join(
            f"{name}={value.label if isinstance(value, TensorKind) else value}" for name, value in self.arguments
        )

    @classmethod
    def from_document(cls, text: str) -> Self:
        """Return the problem with this document.

        Raises:
            UsageError: the text is invalid.
        """
        try:
            data = _loaded(text, MAX_PROBLEM_TEXT)
            if not isinstance(data, dict):
                raise TypeError(f"an object was expected, but got {text:.80}")
            return cls(tuple((name, _parsed(data[name])) for name in sorted(data)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"Not a problem of a tuned function: {error}") from error

    def distance(self, other: "Problem") -> float | None:
        """How far the sizes are apart, in factors of two; None where the two cannot share a config: other data types,
        ranks, memory orders, or plain values that are no sizes."""
        mine, others = dict(self.arguments), dict(other.arguments)
        if mine.keys() != others.keys():
            return None
        steps = [_distance(value, others[name]) for name, value in mine.items()]
        return None if None in steps else sum(step for step in steps if step is not None)


def _kind(name: str, value: Any) -> TensorKind | Plain:
    from torch import Tensor

    if isinstance(value, Tensor):
        return TensorKind(str(value.dtype).removeprefix("torch."), tuple(value.shape), tuple(value.stride()))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(
        f"The arguments of a tuned function are tensors, numbers, texts and None, but `{name}` is a "
        f"{type(value).__name__}. Pass its parts."
    )


def _loaded(text: object, longest: int) -> Any:
    """The JSON value of a stored text, whose length is bounded before anything parses it.

    Raises:
        UsageError: it is too long, or no JSON.
    """
    if not isinstance(text, str) or len(text) > longest:
        raise UsageError(f"A stored problem or config is a text of up to {longest} characters, but got {text!r:.80}.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"A stored problem or config is JSON, but got {text:.80}: {error}") from error


def _json(value: TensorKind | Plain) -> Any:
    if isinstance(value, TensorKind):
        return {"dtype": value.dtype, "shape": value.shape, "strides": value.strides}
    return value


def _parsed(value: Any) -> TensorKind | Plain:
    if isinstance(value, dict):
        shape, strides = tuple(value["shape"]), tuple(value["strides"])
        if len(shape) != len(strides) or any(type(size) is not int for size in (*shape, *strides)):
            raise ValueError(f"a tensor has as many strides as sizes, all integers, but got {value!r:.200}")
        return TensorKind(str(value["dtype"]), shape, strides)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"an argument is a tensor or a plain value, but got {value!r:.200}")


def _distance(one: TensorKind | Plain, other: TensorKind | Plain) -> float | None:
    if isinstance(one, TensorKind) and isinstance(other, TensorKind):
        if (one.dtype, len(one.shape), one.order) != (other.dtype, len(other.shape), other.order):
            return None
        return sum(_steps(size, another) for size, another in zip(one.shape, other.shape, strict=True))
    if type(one) is int and type(other) is int and min(one, other) > 0:
        return _steps(one, other)
    return 0.0 if type(one) is type(other) and one == other else None


def _steps(size: int, other: int) -> float:
    return abs(log2(max(1, size) / max(1, other)))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
