"""One call of an autotuned kernel that no choice is known for yet."""

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import (
    BYTES,
    CONFIGS,
    MAX_CONFIG_TEXT,
    PROGRAMS,
    LaunchConfig,
    LaunchProblem,
    Plain,
    launch_config,
    plain,
    triton_config,
)
from blocktune.runtime.autotuned.reach import is_in_reach
from blocktune.runtime.autotuned.settings import Settings

if TYPE_CHECKING:
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    JittedFunction: TypeAlias = JITFunction | InterpretedFunction

Grid = Callable[[Mapping[str, object]], Sequence[int]] | Sequence[int]

FAR = 4.0
"""How many times another size is so far away that another config may win there."""


@dataclass(frozen=True, slots=True)
class LaunchSize:
    """The size of a launch.

    programs: of the grid of the list's first config. tensor_bytes: of its tensors. is_trivial: it has no program at
    all, or one whatever the config, so that its times say nothing of other launches.
    """

    programs: int
    tensor_bytes: int
    is_trivial: bool = False

    @property
    def entries(self) -> dict[str, int]:
        """What a stored problem holds of it."""
        return {PROGRAMS: self.programs, BYTES: self.tensor_bytes}

    @classmethod
    def stored(cls, problem: LaunchProblem) -> "LaunchSize | None":
        """Return the size that a winner was measured with; None if its problem does not tell, as of version 0.1."""
        found = dict(problem.arguments)
        programs, tensor_bytes = found.get(PROGRAMS), found.get(BYTES)
        return cls(programs, tensor_bytes) if type(programs) is int and type(tensor_bytes) is int else None

    def factor(self, other: "LaunchSize") -> float:
        """Return how many times the one is larger than the other."""
        pairs = ((self.programs, other.programs), (self.tensor_bytes, other.tensor_bytes))
        return max(max(1, *pair) / max(1, min(pair)) for pair in pairs)

    def is_near(self, other: "LaunchSize") -> bool:
        """Return whether a config that is fastest at one of two sizes may serve the other one."""
        return self.is_trivial == other.is_trivial and (self.is_trivial or self.factor(other) <= FAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotunedCall:
    """A launch with its arguments, and what it may be launched with.

    tuner: Triton's object. function: the jitted function inside. problem: without the list of configs and the size.
    configs: those that are left after pruning, in the order of the list, by their stored form. size: None where the
    grid does not tell.
    """

    tuner: "Autotuner"
    function: "JittedFunction"
    name: str
    source_hash: str
    problem: LaunchProblem
    configs: "Mapping[LaunchConfig, triton.Config]"
    args: Sequence[object]
    kwargs: Mapping[str, object]
    settings: Settings
    size: LaunchSize | None = None

    @property
    def named(self) -> dict[str, object]:
        """The arguments by name, the grid and launch options included, as hooks get them."""
        return {**dict(zip(self.tuner.arg_names, self.args, strict=False)), **self.kwargs}

    def grid(self, meta: Mapping[str, object]) -> tuple[int, ...]:
        """Return the grid of a launch with these arguments and constants."""
        grid = cast(Grid, self.kwargs["grid"])
        return tuple(grid(meta) if callable(grid) else grid)

    def launched(self, config: LaunchConfig) -> "triton.Config":
        """Return what Triton launches a config with. One of the list keeps its hook; another has that of the list's
        first config."""
        found = self.configs.get(config)
        if found is None:
            found = triton_config(config)
            found.pre_hook = self.configs[self.default].pre_hook
            found.kwargs = {name: self._values.get((name, value), value) for name, value in found.kwargs.items()}
        return found

    @property
    def _values(self) -> dict[tuple[str, Plain], object]:
        """The values of the list that are stored as their text, by name and text."""
        given = (item for config in self.configs.values() for item in config.kwargs.items())
        return {(name, plain(value)): value for name, value in given if plain(value) is not value}

    def takes(self, config: LaunchConfig) -> bool:
        """Return whether a stored config may be launched: one of the list or, where the search goes beyond that, one
        that it can come to. Another would set arguments of the call, leave constants out or change what they mean, or
        bring a stranger's code (`ir_override`)."""
        return config in self.configs or (self.settings.expand > 0 and is_in_reach(config, self.configs))

    def named_with(self, config: LaunchConfig) -> dict[str, object]:
        """Return the arguments by name with the parameters of a config, as hooks and functions of authors get them."""
        return {**self.named, **self.launched(config).all_kwargs()}

    @property
    def default(self) -> LaunchConfig:
        """The first config of the list."""
        return next(iter(self.configs))

    @property
    def sized_problem(self) -> LaunchProblem:
        """The problem with the size of the launch, as trials are stored."""
        return self.problem if self.size is None else self.problem.having(self.size.entries)

    def size_factor(self, problem: LaunchProblem) -> float:
        """Return how many times larger one launch is, this one or that of a stored problem; `FAR` where the size of
        one is not known."""
        size = LaunchSize.stored(problem)
        return FAR if size is None or self.size is None else self.size.factor(size)

    @property
    def listed_problem(self) -> LaunchProblem:
        """The problem with the list that its winner is chosen from: each list has winners of its own."""
        words = "\n".join(sorted(config.document for config in self.configs))
        if self.settings.expand:
            words += f"\nexpand {self.settings.expand}"
        digest = hashlib.sha256(words.encode()).hexdigest()[:12]
        return self.sized_problem.having({CONFIGS: digest})


def size_of(
    tuner: "Autotuner", function: "JittedFunction", args: Sequence[object], kwargs: Mapping[str, object]
) -> LaunchSize | None:
    """Return the size of a launch; None without a grid."""
    grid = cast("Grid | None", kwargs.get("grid"))
    if grid is None:
        return None
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    tensors = [tensor for value in named.values() if isinstance(tensor := getattr(value, "base", value), Tensor)]
    tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not callable(grid):
        programs = math.prod(grid)
        return LaunchSize(programs, tensor_bytes, is_trivial=programs == 0)
    first, *others = (
        _ReadMeta(grid_arguments(tuner.fn, function, {**named, **config.all_kwargs()})) for config in tuner.configs
    )
    programs = math.prod(grid(first))
    depends = not first.read.isdisjoint(tuner.configs[0].kwargs)
    is_trivial = programs <= depends and all(math.prod(grid(meta)) <= 1 for meta in others)
    return LaunchSize(programs, tensor_bytes, is_trivial)


class _ReadMeta(dict[str, object]):
    """Arguments of a grid function that note which of them it reads."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        super().__init__(arguments)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.read.add(name)
        return super().__getitem__(name)


def grid_arguments(fn: object, function: "JittedFunction", named: Mapping[str, object]) -> dict[str, object]:
    """Return what a grid function is given: all arguments by name, defaults and heuristics included.

    Args:
        fn: what the tuner launches, with heuristics around the function.
        function: the jitted function inside.
        named: the arguments by name, those of a config included.
    """
    parameters = inspect.signature(function.fn).parameters.items()
    defaults = {name: each.default for name, each in parameters if each.default is not inspect.Parameter.empty}
    meta = {**defaults, **named}
    while fn is not function:
        for name, value in getattr(fn, "values", {}).items():
            meta[name] = value(meta)
        fn = fn.fn  # type: ignore[attr-defined]
    return meta


def jitted_function(fn: object) -> "JittedFunction":
    """Return the function of `triton.jit` inside of decorators.

    Raises:
        UsageError: there is none.
    """
    from triton.runtime.jit import JITFunction

    # needs NumPy, and is imported with the first kernel that is interpreted
    interpreter = sys.modules.get("triton.runtime.interpreter")
    kinds = JITFunction if interpreter is None else (JITFunction, interpreter.InterpretedFunction)
    inner = fn
    while inner is not None and not isinstance(inner, kinds):
        inner = None if inspect.isfunction(inner) else getattr(inner, "fn", None)
    if inner is None:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise UsageError(f"{name} is not a function of `triton.jit`. Decorate it first.")
    return inner


def tuner_in(decorated: object) -> "Autotuner | None":
    """Return Triton's tuner in a decorated function; None if there is none."""
    from triton.runtime.autotuner import Autotuner

    inner = decorated
    while inner is not None and not isinstance(inner, Autotuner):
        inner = getattr(inner, "fn", None)
    return inner


def pruned_configs(tuner: "Autotuner", args: Sequence[object], kwargs: Mapping[str, object]) -> "list[triton.Config]":
    """Return the configs of a call that its own pruning leaves, in the order of the list. As under Triton, a list of
    one is not pruned."""
    if len(tuner.configs) == 1:
        return list(tuner.configs)
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        return list(tuner.prune_configs(dict(kwargs)))
    finally:
        tuner.nargs = None


def positional(tuner: "Autotuner", arguments: Mapping[str, object]) -> tuple[list[object], dict[str, object]]:
    """Return named arguments as a program would give them: by place as far as they go, the rest by name. Functions that
    prune a list get both apart."""
    names, args = iter(tuner.arg_names), []
    left = dict(arguments)
    for name in names:
        if name not in left:
            break
        args.append(left.pop(name))
    return args, left


def require_no_conflict(name: str, configs: "Sequence[triton.Config]", given: Mapping[str, object]) -> None:
    """Require that a call gives no parameter that is tuned.

    Raises:
        UsageError: the call gives a parameter that is tuned.
    """
    conflicts = sorted({parameter for config in configs for parameter in config.all_kwargs()} & given.keys())
    if conflicts:
        raise UsageError(
            f"The call of {name} gives {', '.join(conflicts)}, which its configs give too. Leave it out of the call, "
            "or out of the configs."
        )


def require_storable(call: AutotunedCall) -> None:
    """Require that a store can hold the problem of a call and its configs.

    Raises:
        UsageError: they are too long.
    """
    _ = call.listed_problem
    long = next((config for config in call.configs if len(config.document) > MAX_CONFIG_TEXT), None)
    if long is not None:
        raise UsageError(
            f"A config may have up to {MAX_CONFIG_TEXT} characters, but one of {call.name} has {len(long.document)}: "
            f"{long.document:.80}... Give it fewer parameters, or shorter names."
        )


def by_stored_form(name: str, configs: "Sequence[triton.Config]") -> "dict[LaunchConfig, triton.Config]":
    """Return the configs of a kernel by their stored form; of equal ones the first counts."""
    forms: dict[LaunchConfig, triton.Config] = {}
    for config in configs:
        forms.setdefault(launch_config(name, config), config)
    return forms
