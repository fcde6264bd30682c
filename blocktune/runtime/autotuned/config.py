"""Problems and configs of users' own kernels: a problem identifies a call, a config holds its parameters."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    import triton

MAX_VALUE = 1 << 63
"""Numbers from here on are known by their text, since no database holds them."""

MAX_TEXT = 200
"""Characters of a value; a longer text is known by its beginning and its hash."""

MAX_PROBLEM_TEXT = 1000
MAX_CONFIG_TEXT = 1000

TYPES = "(types)"
"""The entry of a problem that describes the arguments which are no key values: no argument can have such a name."""

CONFIGS = "(configs)"
"""The entry of a problem that identifies the list of configs which a winner was chosen from."""

METHOD = "(method)"
"""The entry of a problem that identifies how its configs are measured, where that is not as usual."""

PROGRAMS, BYTES = "(programs)", "(bytes)"
"""The entries of a stored problem with the size of the measured launch: its grid, and the bytes of its tensors."""

UNSTORED = "(call)"
"""The only entry of a problem that stands for a call in its process, where its own cannot be told."""

Plain = int | float | bool | str | None

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
"""What `triton.Config` takes in addition to what is compiled in."""

_USUAL = {"num_ctas": 1, "maxnreg": None, "ir_override": None}


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The parameters of one launch of a tuned kernel, in the order of their names.

    Raises:
        UsageError: a name is not valid in Python, or a kernel cannot take a value.
    """

    kernel: str
    values: tuple[tuple[str, Plain], ...]

    def __post_init__(self) -> None:
        for name, value in self.values:
            if not isinstance(name, str) or not name.isidentifier() or not isinstance(value, Plain):
                raise UsageError(f"A parameter must be a name with a plain value, but got {name!r}={value!r}.")
            if isinstance(value, (int, float)) and not abs(value) < MAX_VALUE:
                raise UsageError(f"A parameter must be less than {MAX_VALUE}, but got {name}={value}.")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    @property
    def parameters(self) -> dict[str, Plain]:
        return dict(self.values)

    @property
    def label(self) -> str:
        """A short name for people, such as `softmax BLOCK=1024 num_warps=8`."""
        return " ".join([self.kernel.rpartition(":")[2], *(f"{name}={value}" for name, value in self.values)])

    @property
    def document(self) -> str:
        """The parameters as canonical JSON text."""
        return json.dumps(self.parameters, sort_keys=True, separators=(",", ":"))

    def to_json(self) -> dict[str, object]:
        return {"kernel": self.kernel, "parameters": self.parameters}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """Return the config that `to_json` wrote.

        Raises:
            UsageError: a value is missing or out of range.
        """
        kernel, parameters = data.get("kernel"), data.get("parameters")
        if not isinstance(kernel, str) or not isinstance(parameters, dict):
            raise UsageError(f"A config must be an object with `kernel` and `parameters`, but got {data!r:.200}.")
        return cls(kernel, tuple(parameters.items()))

    @classmethod
    def from_document(cls, kernel: object, text: object) -> Self:
        """Return the config of a kernel with this document.

        Raises:
            UsageError: the text is invalid.
        """
        return cls.from_json({"kernel": kernel, "parameters": _loaded(text, MAX_CONFIG_TEXT)})


@dataclass(frozen=True, slots=True)
class LaunchProblem:
    """The problem of a call of a tuned kernel: key values by the names of the arguments, and entries such as `TYPES`.

    Raises:
        UsageError: a value is not plain, or there are too many to be a key.
    """

    arguments: tuple[tuple[str, Plain], ...]

    def __post_init__(self) -> None:
        strange = next((name for name, value in self.arguments if not isinstance(value, Plain)), None)
        if strange is not None:
            raise UsageError(f"The value of the key `{strange}` is not a number, text or None. Pass its parts.")
        if len(self.document) > MAX_PROBLEM_TEXT:
            raise UsageError(
                f"The key of a call may have up to {MAX_PROBLEM_TEXT} characters, but this one has "
                f"{len(self.document)}: {self.document:.80}... Name fewer keys, or shorter texts."
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Plain]) -> Self:
        """Return the problem of named values, which are kept in the order of their names."""
        return cls(tuple((name, arguments[name]) for name in sorted(arguments)))

    def to_json(self) -> dict[str, Plain]:
        return dict(self.arguments)

    def without(self, *names: str) -> "LaunchProblem":
        """Return the problem without some entries."""
        return LaunchProblem(tuple(entry for entry in self.arguments if entry[0] not in names))

    def having(self, entries: Mapping[str, Plain]) -> "LaunchProblem":
        """Return the problem with further entries."""
        return LaunchProblem.of(dict(self.arguments) | dict(entries))

    @property
    def key_values(self) -> dict[str, Plain]:
        """The values of arguments, by name; all other entries have names that no argument can have."""
        return {name: value for name, value in self.arguments if not name.startswith("(")}

    @property
    def document(self) -> str:
        """Canonical JSON text: equal problems, equal text."""
        return json.dumps(dict(self.arguments), sort_keys=True, separators=(",", ":"))

    @property
    def label(self) -> str:
        """A short name for people, such as `M=4096 N=1024 (bf16 bf16 fp32)`."""
        values = dict(self.arguments)
        words = [f"{name}={value}" for name, value in self.key_values.items()]
        words += [f"({types})"] if (types := values.get(TYPES)) else []
        words += [f"{values[PROGRAMS]} programs"] if PROGRAMS in values else []
        return " ".join(words)

    @classmethod
    def from_document(cls, text: object) -> Self:
        """Return the problem with this document.

        Raises:
            UsageError: the text is invalid.
        """
        try:
            data = _loaded(text, MAX_PROBLEM_TEXT)
            if not isinstance(data, dict):
                raise TypeError(f"an object was expected, but got {data!r:.80}")
            return cls(tuple((name, _parsed(data[name])) for name in sorted(data)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"The stored problem of a tuned kernel is not valid: {error}") from error

    def distance(self, other: "LaunchProblem") -> float | None:
        """Return how far the sizes are apart, in factors of two; None where the two cannot share a config.

        That is so for other data types, another list of configs, and key values that are no sizes.
        """
        mine, others = dict(self.arguments), dict(other.arguments)
        if mine.keys() != others.keys():
            return None
        steps = [_distance(value, others[name]) for name, value in mine.items()]
        return None if None in steps else sum(step for step in steps if step is not None)


@dataclass(frozen=True, slots=True)
class KernelProblem:
    """Name a problem of one autotuned kernel: what an `AttentionShape` is for attention.

    kernel: where the function can be imported, `module:function`.
    """

    kernel: str
    problem: LaunchProblem

    @property
    def label(self) -> str:
        """A short name of the problem for people."""
        return self.problem.label

    @property
    def full_label(self) -> str:
        """The kernel and the problem for people."""
        return f"{self.kernel} {self.label}"

    @property
    def of_any_list(self) -> "KernelProblem":
        """The problem without the list of configs that a winner was chosen from."""
        return KernelProblem(self.kernel, self.problem.without(CONFIGS))

    @property
    def document(self) -> str:
        """The problem as canonical JSON text; kernels share equal ones."""
        return self.problem.document

    def to_json(self) -> dict[str, object]:
        return {"kernel": self.kernel, "problem": dict(self.problem.arguments)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the problem that `to_json` wrote.

        Raises:
            UsageError: a value is missing or invalid.
        """
        kernel, arguments = data.get("kernel"), data.get("problem")
        if not isinstance(kernel, str) or not isinstance(arguments, dict):
            raise UsageError(f"A problem must be an object with `kernel` and `problem`, but got {data!r:.200}.")
        return cls(kernel, LaunchProblem.of(arguments))


def plain(value: object) -> Plain:
    """Return a value as a problem or a config keeps it. One that is not plain is known by its text, as are numbers that
    no database holds."""
    if value is None or (isinstance(value, (int, float)) and abs(value) < MAX_VALUE):
        return value
    text = str(value)
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}... {digest}"


def launch_config(kernel: str, config: "triton.Config") -> LaunchConfig:
    """Return the stored form of a config. Its hook is no part of it; a value that is not plain is known by its text."""
    options = {name: getattr(config, name, _USUAL.get(name)) for name in LAUNCH_OPTIONS}
    told = {name: value for name, value in options.items() if name not in _USUAL or value != _USUAL[name]}
    return LaunchConfig(kernel, tuple((name, plain(value)) for name, value in {**config.kwargs, **told}.items()))


def triton_config(config: LaunchConfig) -> "triton.Config":
    """Return the config to launch with that a stored one stands for."""
    import triton

    parameters = config.parameters
    options = {name: parameters.pop(name) for name in LAUNCH_OPTIONS if name in parameters}
    return triton.Config(parameters, **options)


def _loaded(text: object, longest: int) -> object:
    """Return the JSON value of a stored text, whose length is bounded before anything parses it.

    Raises:
        UsageError: it is too long, or no JSON.
    """
    if not isinstance(text, str) or len(text) > longest:
        raise UsageError(
            f"A stored problem or config must be a text of up to {longest} characters, but got {text!r:.80}."
        )
    try:
        value: object = json.loads(text)
        return value
    except (ValueError, RecursionError) as error:
        raise UsageError(f"A stored problem or config is not JSON: {text:.80}: {error}") from error


def _parsed(value: object) -> Plain:
    """Return a stored value; a tensor, which version 0.1 described by an object, becomes its text."""
    if isinstance(value, dict):
        return f"{value['dtype']}{list(value['shape'])}"
    if isinstance(value, Plain):
        return value
    raise ValueError(f"a key value must be plain, but got {value!r:.200}")


def _distance(one: Plain, other: Plain) -> float | None:
    if type(one) is int and type(other) is int and min(one, other) > 0:
        return abs(math.log2(one / other))
    return 0.0 if type(one) is type(other) and one == other else None
