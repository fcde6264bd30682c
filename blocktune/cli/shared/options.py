"""The flags that several commands share, and their translation into the words of the other rooms, done here once."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from blocktune.cli.shared import completion
from blocktune.kernels.files.variables import DB
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.candidates.shape_defaults import DEFAULT_TOKENS, DEFAULT_WIDTH, complete_shape
from blocktune.tuner.measure.device_choice import DEFAULT_DEVICE

DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help=f"GPU name, as in `tune devices`.  [default: the GPU here, else {DEFAULT_DEVICE}]",
        autocompletion=completion.devices,
    ),
]
OnlyDevice = Annotated[
    str | None,
    typer.Option("--device", help="Only results for this GPU.  [default: all]", autocompletion=completion.devices),
]
OneDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="GPU whose results are written.  [default: the only one in the database]",
        autocompletion=completion.devices,
    ),
]


def _database(db: str | None) -> str | None:
    """Return the database that the flag names, else the environment."""
    return db or DB.text() or None


Database = Annotated[
    str | None,
    typer.Option("--db", callback=_database, help=f"Database path or URL.  [default: {DB.name}, else {DB.default}]"),
]
Signature = Annotated[
    str | None,
    typer.Option("--signature", help="Types or values of the arguments: *bf16,i32:16,i32=1,none."),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show all that was found: rivals, occupancy, what was dropped and why.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bf16, fp16, fp32 or fp8.", autocompletion=completion.dtypes)]
IsCausal = Annotated[bool, typer.Option("--causal", help="Query i sees keys 0..i, as in PyTorch.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeFlags:
    """One attention shape as flags; `complete_shape` says what a size that is not given becomes."""

    seq: Annotated[int, typer.Option("--seq", help="Queries per sequence.")]
    dim: Annotated[int, typer.Option("--dim", help="Head dimension.")]
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", help=f"Sequences in the batch.  [default: {DEFAULT_TOKENS} / the longer of seq and seq-k]"
        ),
    ] = None
    heads: Annotated[int | None, typer.Option("--heads", help=f"Query heads.  [default: {DEFAULT_WIDTH} / dim]")] = None
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Key/value heads.  [default: heads]")] = None
    seq_k: Annotated[
        int | None, typer.Option("--seq-k", help="Keys per sequence.  [default: seq, unless that is 1]")
    ] = None
    dim_v: Annotated[int | None, typer.Option("--dim-v", help="Head dimension of the values.  [default: dim]")] = None
    dtype: Dtype = "bf16"
    causal: IsCausal = False
    causal_lower_right: Annotated[
        bool, typer.Option("--causal-lower-right", help="Causal up to the last key, as in FlashAttention.")
    ] = False
    direction: Annotated[
        str, typer.Option("--direction", help="forward or backward.", autocompletion=completion.directions)
    ] = "forward"
    features: Annotated[
        str,
        typer.Option(
            "--features", help="Features, such as 'window=127:0 softcap' or 'cached kv=e4m3'; in a grid, + is a blank."
        ),
    ] = ""

    def shape(self) -> AttentionShape:
        """Return the shape that the flags mean.

        Raises:
            UsageError: the sizes do not fit together.
        """
        if self.direction not in list(Direction):
            raise UsageError(f"`direction` must be one of {', '.join(Direction)}, but got {self.direction!r:.80}.")
        if self.causal and self.causal_lower_right:
            raise UsageError("`--causal` and `--causal-lower-right` exclude each other, but both are given. Drop one.")
        plain = complete_shape(
            self.seq,
            self.dim,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            seq_k=self.seq_k,
            dim_v=self.dim_v,
            dtype=self.dtype,
            causal=Causal.LOWER_RIGHT if self.causal_lower_right else self.causal,
        )
        features = Features.parse(self.features.replace("+", " "))
        return replace(plain, direction=Direction(self.direction), features=features)

    def assumed(self) -> str:
        """Return what was not given, as flags with their values and where these come from; empty when all sizes were
        given."""
        shape = self.shape()
        defaults = []
        if self.batch is None:
            tokens = "seq-k" if shape.seqlen_k > shape.seqlen_q else "seq"
            defaults.append(f"--batch {shape.batch} (batch * {tokens} = {DEFAULT_TOKENS})")
        if self.heads is None:
            defaults.append(f"--heads {shape.num_heads} (heads * dim = {DEFAULT_WIDTH})")
        return f"assumed {', '.join(defaults)}" if defaults else ""


NEEDED = ("seq", "dim")
"""The sizes without which there is no shape."""


def with_shape_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of `ShapeFlags` in place of its parameter `flags`."""
    return _expand_flags(command, inspect.signature(ShapeFlags).parameters, lambda values: ShapeFlags(**values))


def with_optional_shape_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of `ShapeFlags` in place of its parameter `flags`, which is None where none is given."""
    shared = dict(inspect.signature(ShapeFlags).parameters)
    for name in NEEDED:
        declared, option = get_args(shared[name].annotation)
        shared[name] = shared[name].replace(annotation=Annotated[declared | None, option], default=None)
    return _expand_flags(command, shared, _flags_if_any)


def require_flags(flags: ShapeFlags | None) -> ShapeFlags:
    """Return the flags of a shape.

    Raises:
        UsageError: there are none.
    """
    if flags is None:
        raise UsageError("A shape needs `--seq` and `--dim`, but neither is given. Add them, or name a MODULE:KERNEL.")
    return flags


def kernel_instead(flags: ShapeFlags | None, kernel: str) -> str:
    """Return the name of the kernel that a command is about.

    Raises:
        UsageError: a shape is given, too.
    """
    if flags is not None:
        raise UsageError(
            f"A command is about a shape or about a kernel, but got --seq and --dim and {kernel}. Leave one out."
        )
    return kernel


def _flags_if_any(values: Mapping[str, Any]) -> ShapeFlags | None:
    """Return the flags of a shape, if any is given.

    Raises:
        UsageError: some flag is given, but not those that every shape needs.
    """
    missing = [f"--{name}" for name in NEEDED if values[name] is None]
    if not missing:
        return ShapeFlags(**values)
    defaults = {name: parameter.default for name, parameter in inspect.signature(ShapeFlags).parameters.items()}
    given = [f"--{name.replace('_', '-')}" for name, value in values.items() if value not in (None, defaults[name])]
    if given:
        raise UsageError(
            f"A shape needs `--seq` and `--dim`, but {', '.join(given)} came without {missing[0]}. Add it."
        )
    return None


def _expand_flags(
    command: Callable[..., None],
    shared: Mapping[str, inspect.Parameter],
    flags_of: Callable[[dict[str, Any]], ShapeFlags | None],
) -> Callable[..., None]:
    """Return the command with these parameters in place of `flags`."""
    own = [value for name, value in inspect.signature(command).parameters.items() if name != "flags"]

    @wraps(command)
    def expanded(**values: Any) -> None:
        flags = flags_of({name: values.pop(name) for name in shared})
        command(flags=flags, **values)

    parameters = [value.replace(kind=inspect.Parameter.KEYWORD_ONLY) for value in (*shared.values(), *own)]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded
