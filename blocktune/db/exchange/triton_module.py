"""Winners as a Python module that its users import: `CONFIGS`, a dictionary of `triton.Config`.

What stands in it comes from a database or document that anyone may have written. So the text is parsed again before
anybody gets it, and given out only if it holds these winners and not a statement more.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.db.records.records import AnyBest
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import Plain

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Parameters that `triton.Config` takes in addition to what is compiled in."""

_DOCSTRING = "Winners of blocktune, by (kernel, shape)."


@dataclass(frozen=True, slots=True)
class TritonEntry:
    """One winner: its key in the dictionary, what is compiled in, the launch options, and its worth for a comment."""

    kernel: str
    label: str
    meta: Mapping[str, Plain]
    options: Mapping[str, Plain]
    worth: str

    @classmethod
    def of(cls, best: AnyBest) -> "TritonEntry":
        """Return a winner. Parameters of our kernels are upper case in `triton.Config`."""
        meta, options = _split(best.config.parameters)
        if isinstance(best.shape, AttentionShape):
            meta = {name.upper(): value for name, value in meta.items()}
        worth = f"{best.origin}, {_time(best)}, source {best.kernel_hash}"
        return cls(best.config.kernel, best.shape.label, meta, options, worth)

    @property
    def text(self) -> str:
        """The lines of the dictionary."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        key = f"({self.kernel!r}, {self.label!r})"
        return f"    # {self.worth}\n    {key}: triton.Config({dict(self.meta)!r}{options}),"


def triton_module(device_name: str, entries: Sequence[TritonEntry]) -> str:
    """Return the text of the module.

    Raises:
        UsageError: a name or a comment would become more than what it is.
    """
    head = f'"""{_DOCSTRING}"""\n\nimport triton\n\n'
    body = "\n".join(entry.text for entry in entries)
    text = f"{head}DEVICE = {device_name!r}\n\nCONFIGS = {{\n{body}\n}}\n"
    if not all(entry.worth.isprintable() for entry in entries) or _read_back(text) != _expected_dump(
        device_name, entries
    ):
        raise UsageError(
            "A module of `triton.Config` may hold nothing but winners, but one of these would add something else. "
            "Check the database with `tune doctor`, and export only what you trust."
        )
    return text


def _time(best: AnyBest) -> str:
    return "not timed" if best.time_us is None else f"{best.time_us:.1f} us"


def _split(parameters: Mapping[str, Plain]) -> tuple[dict[str, Plain], dict[str, Plain]]:
    """Return what is compiled in, and the launch options."""
    options = {name: value for name, value in parameters.items() if name in LAUNCH_OPTIONS}
    return {name: value for name, value in parameters.items() if name not in options}, options


def _read_back(text: str) -> str | None:
    """Return what Python sees in the text; None where that is not even a module."""
    try:
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):
        return None


def _expected_dump(device_name: str, entries: Iterable[TritonEntry]) -> str:
    """Return what Python has to see: the same module, made of nodes instead of text."""
    pairs = [(_literal((entry.kernel, entry.label)), _config(entry)) for entry in entries]
    table = ast.Dict([key for key, _ in pairs], [config for _, config in pairs])
    body: list[ast.stmt] = [
        ast.Expr(ast.Constant(_DOCSTRING)),
        ast.Import([ast.alias("triton")]),
        ast.Assign([ast.Name("DEVICE", ast.Store())], _literal(device_name)),
        ast.Assign([ast.Name("CONFIGS", ast.Store())], table),
    ]
    return ast.dump(ast.Module(body, []))


def _config(entry: TritonEntry) -> ast.expr:
    keywords = [ast.keyword(name, _literal(value)) for name, value in entry.options.items()]
    function = ast.Attribute(ast.Name("triton", ast.Load()), "Config", ast.Load())
    return ast.Call(function, [_literal(dict(entry.meta))], keywords)


def _literal(value: Any) -> ast.expr:
    """Return the node of a plain value."""
    if isinstance(value, tuple):
        return ast.Tuple([_literal(item) for item in value], ast.Load())
    if isinstance(value, dict):
        return ast.Dict([_literal(key) for key in value], [_literal(item) for item in value.values()])
    if isinstance(value, (int, float)) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)
