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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

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
        UsageError: a value has another type, or the layout is unknown.
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

    def compute(self, shape: AttentionShape, question: AnyQuestion) -> Compute:
        """Return the launch of a forward, or of a backward whose forward ran before.

        Raises:
            UsageError: there is no such function, its contract does not have the shape, or it changes its inputs or
                does not read them.
        """
        self._require(shape)
        compute = for_question(self._attend(shape), question)
        before = [tensor.clone() for tensor in (question.q, question.k, question.v)]
        compute(question.q, question.k, question.v)
        if not all(map(_equal, before, (question.q, question.k, question.v))):
            raise UsageError(f"{self.function} changes its inputs, which all contenders share. Let it write elsewhere.")
        if problem := stale_problem(functools.partial(compute, question.q, question.k, question.v), question):
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

    def _attend(self, shape: AttentionShape) -> Compute:
        function, turns = object_named(self.function), self.layout == "bshd"
        options: dict[str, Any] = {self.causal: shape.causal is not Causal.NONE} if self.causal else {}
        options |= {self.scale: softmax_scale(shape)} if self.scale else {}

        def attend(q: Any, k: Any, v: Any) -> Any:
            if not turns:
                return function(q, k, v, **options)
            return function(*(tensor.transpose(1, 2) for tensor in (q, k, v)), **options).transpose(1, 2)

        return attend


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
    """Return the rivals of a file by their function, which names them among the contenders.

    Raises:
        UsageError: the file is missing or is no TOML, a table is not a rival, or two have one function.
    """
    try:
        document = tomllib.loads(read_text(path, SHAPES_BYTES))
    except OSError as error:
        raise UsageError(
            f"{error.strerror}: {path}. `--rivals` names a TOML file with a table for each rival."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML, as files of rivals are: {error!s:.200}. Correct it.") from error
    rivals: dict[str, Rival] = {}
    for name, table in document.items():
        rival = _rival(f"{path} [{name:.80}]", table)
        if rivals.setdefault(rival.function, rival) is not rival:
            raise UsageError(f"{path} names {rival.function} twice. Give each rival a function of its own.")
    return rivals


def _rival(where: str, table: Any) -> Rival:
    known = [field.name for field in fields(Rival)]
    if not isinstance(table, Mapping) or "function" not in table or not set(table) <= set(known):
        raise UsageError(
            f"A rival is a table with `function` and, where needed, {', '.join(known[1:])}, but {where} is "
            f"{table!r:.200}. Correct it."
        )
    return Rival(**table)


def _equal(one: Any, other: Any) -> bool:
    return bool((one == other).all())
