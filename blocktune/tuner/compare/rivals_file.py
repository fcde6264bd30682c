"""`--rivals FILE`: attention of anybody as a contender: a TOML file names functions and says how each is called.

    [mine]
    function = "my_kernels:attend"   # attend(q, k, v, causal=True, sm_scale=0.125) returns the output
    causal = "causal"                # its argument; a function without one computes no causal shape
    scale = "sm_scale"               # its argument; a function without one divides by the root of head_dim itself
    layout = "bshd"                  # of all tensors, [batch, length, heads, dim]; bhsd unless given
    gradients = true                 # whether autograd differentiates it; false unless given

A rival is checked as all contenders are, and besides that its results must follow from its inputs and leave them alone:
whoever answers from an earlier call is no contender.
"""

import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from blocktune.kernels.files.reading import SHAPES_BYTES, read_text
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal, Direction
from blocktune.tuner.compare.peers import Compute, for_question
from blocktune.tuner.correctness.backward import GradientQuestion
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.offline.specialization import object_named

LAYOUTS = ("bhsd", "bshd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A function that computes attention, `module:function`, and the contract by which it is called, as the file has
    it.

    Raises:
        UsageError: a value has another type, the layout is unknown, or the function has no module, as our own
            contenders have none.
    """

    function: str
    causal: str = ""
    scale: str = ""
    layout: str = LAYOUTS[0]
    gradients: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), bool if field.name == "gradients" else str
            if type(value) is not kind:
                word = "true or false" if kind is bool else "a text"
                raise UsageError(f"`{field.name}` of a rival must be {word}, but got {value!r:.80}. Correct it.")
        if self.layout not in LAYOUTS:
            raise UsageError(f"`layout` of {self.function} must be bhsd or bshd, but got {self.layout!r:.80}.")
        if not all(self.function.partition(":")):
            raise UsageError(f"`function` of a rival must be `module:function`, but got {self.function!r:.80}.")

    def load(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            UsageError: nothing has this name, or it is no function.
        """
        found = object_named(self.function)
        if not callable(found):
            raise UsageError(f"{self.function} is of type {type(found).__name__}, and no function. Name another one.")
        return found  # type: ignore[no-any-return]

    def compute(self, shape: AttentionShape, question: AnyQuestion) -> Compute:
        """Return the launch of a forward, or of a backward whose forward ran before.

        Raises:
            UsageError: there is no such function, its contract does not have the shape, it returns something else than
                an output, or its results do not follow from its inputs.
        """
        self._require(shape)
        given, options = (question.q, question.k, question.v), self._options(shape)
        function = functools.partial(self.load(), **options)
        with torch.no_grad():
            self._require_output(function(*map(self._turned, given)), question)
        compute = for_question(lambda *tensors: self._turned(function(*map(self._turned, tensors))), question)
        if problem := stale_problem(functools.partial(compute, *given), question):
            raise UsageError(problem)
        return compute

    def _require(self, shape: AttentionShape) -> None:
        if shape.features:
            raise UsageError(f"Rivals of a file are compared without features, but the shape is {shape.label}.")
        if shape.dtype == FP8:
            raise UsageError("Rivals of a file take no 8-bit tensors. Compare another data type.")
        if shape.direction is Direction.BACKWARD and not self.gradients:
            raise UsageError(f"{self.function} has no gradients by its contract. Say `gradients = true` if it has.")
        if shape.causal is not Causal.NONE and not self.causal:
            raise UsageError(f"{self.function} has no causal mask by its contract. Name its argument: `causal = ...`.")
        if shape.causal is not Causal.NONE and shape.seqlen_q != shape.seqlen_k:
            raise UsageError(
                f"Rivals of a file do not say how they align the causal mask, but the shape is {shape.label}. Compare "
                "equal lengths."
            )

    def _options(self, shape: AttentionShape) -> dict[str, Any]:
        options: dict[str, Any] = {self.causal: shape.causal is not Causal.NONE} if self.causal else {}
        return options | ({self.scale: softmax_scale(shape)} if self.scale else {})

    def _turned(self, tensor: Any) -> Any:
        return tensor.transpose(1, 2) if self.layout == "bshd" else tensor

    def _require_output(self, found: Any, question: AnyQuestion) -> None:
        if not isinstance(found, torch.Tensor):
            kind = type(found).__name__
            raise UsageError(f"{self.function} must return a tensor, but returned a {kind}. Return the output alone.")
        *rows, _ = question.q.shape
        wanted = self._turned(question.q.new_empty((*rows, question.v.shape[-1])))
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            raise UsageError(
                f"{self.function} must return {wanted.dtype} {list(wanted.shape)}, but returned {found.dtype} "
                f"{list(found.shape)}. Correct it, or its `layout`."
            )


@contextmanager
def inputs_kept(question: AnyQuestion) -> Iterator[None]:
    """Put the inputs of a question back at the end.

    Raises:
        UsageError: some were changed meanwhile.
    """
    before = copied_inputs(question)
    try:
        yield
    finally:
        is_changed = put_back(question, before)
    if is_changed:
        raise UsageError("it changes its inputs, which all contenders share. Let it write elsewhere.")


def copied_inputs(question: AnyQuestion) -> list[torch.Tensor]:
    """Return copies of what contenders read."""
    return [tensor.clone() for tensor in _inputs(question)]


def put_back(question: AnyQuestion, before: Sequence[torch.Tensor]) -> bool:
    """Give changed inputs the values that they had, and return whether there are any."""
    changed = [pair for pair in zip(_inputs(question), before, strict=True) if not torch.equal(*pair)]
    for tensor, kept in changed:
        tensor.copy_(kept)
    return bool(changed)


def _inputs(question: AnyQuestion) -> list[torch.Tensor]:
    return [question.q, question.k, question.v, *([question.dout] if isinstance(question, GradientQuestion) else [])]


def stale_problem(run: Callable[[], Any], question: AnyQuestion) -> str | None:
    """Return that results do not follow from the inputs, if so: where all values, or all gradients of the output, are
    zero, attention, or its gradients, are zero as well."""
    source = question.dout if isinstance(question, GradientQuestion) else question.v
    kept = source.clone()
    try:
        source.zero_()
        found = run()
        results = found if isinstance(found, tuple) else (found,)
        stale = any(bool(result.any()) for result in results)
    finally:
        source.copy_(kept)
    return "its results do not follow from its inputs: it answers from an earlier call" if stale else None


def rivals_in(path: Path) -> dict[str, Rival]:
    """Return the rivals of a file by their function, which names them among the contenders. All are imported.

    Raises:
        UsageError: the file is missing, empty or no TOML, a table is not a rival, a function cannot be imported, or two
            rivals have one function.
    """
    try:
        document = tomllib.loads(read_text(path, SHAPES_BYTES))
    except OSError as error:
        raise UsageError(
            f"{error.strerror}: {path}. `--rivals` names a TOML file with a table for each rival."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML, as files of rivals are: {error!s:.200}. Correct it.") from error
    if not document:
        raise UsageError(f'{path} names no rival. Add a table for each: [mine], then function = "my_kernels:attend".')
    rivals: dict[str, Rival] = {}
    for name, table in document.items():
        where = f"{path} [{name:.80}]"
        rival = _rival(where, table)
        if rivals.setdefault(rival.function, rival) is not rival:
            raise UsageError(f"{where} names {rival.function} twice. Give each rival a function of its own.")
    return rivals


def _rival(where: str, table: Any) -> Rival:
    known = [field.name for field in fields(Rival)]
    if not isinstance(table, Mapping) or "function" not in table or not set(table) <= set(known):
        raise UsageError(
            f"A rival is a table with `function` and, where needed, {', '.join(known[1:])}, but {where} is "
            f"{table!r:.200}. Correct it."
        )
    try:
        rival = Rival(**table)
        rival.load()
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    return rival
