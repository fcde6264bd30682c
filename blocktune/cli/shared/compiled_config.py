"""A config that a command compiles: chosen by flags, compiled in a process of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.render import note
from blocktune.cli.shared import completion
from blocktune.db.records.records import problem_json
from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from blocktune.kernels.base.kernel import AttentionKernel
    from blocktune.kernels.hardware.device import ComputeLimits
    from blocktune.kernels.values.config import KernelConfig
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.occupancy.compiled_code import CompiledCode

DefaultOf = Annotated[
    str | None,
    typer.Option("--kernel", help="Start from this kernel's default.", autocompletion=completion.kernels),
]
BlockM = Annotated[int | None, typer.Option("--block-m", help="Query rows per tile.")]
BlockN = Annotated[int | None, typer.Option("--block-n", help="Key rows per tile.")]
Warps = Annotated[int | None, typer.Option("--warps", help="Warps per block.")]
Stages = Annotated[int | None, typer.Option("--stages", help="Pipeline stages.")]
OwnParameters = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="A parameter of this kernel; may be repeated.",
        autocompletion=completion.own_parameters,
    ),
]


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A config of a kernel, and the shape and limits that it is compiled for."""

    kernel: "AttentionKernel"
    config: "KernelConfig"
    shape: "AttentionShape"
    limits: "ComputeLimits"

    def to_json(self) -> dict[str, Any]:
        return {"config": self.config.to_json(), "shape": problem_json(self.shape)}

    def with_choices(self, choices: Mapping[str, int | None], own: Sequence[str]) -> "CompileRequest":
        """Return the same with the given choices in place of its own.

        Args:
            choices: parameters by name; None leaves one as it is.
            own: further ones as NAME=VALUE.

        Raises:
            UsageError: the kernel has no such parameter, or a value is out of range.
        """
        from blocktune.kernels.values.config import KernelConfig

        name, known = self.config.kernel, self.kernel.parameters
        given = {key: value for key, value in choices.items() if value is not None} | dict(map(_parameter, own))
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise UsageError(f"`{name}` has the parameters {', '.join(known)}, but got {', '.join(unknown)}.")
        config = KernelConfig.of(name, self.config.parameters | given)
        problems = self.kernel.rule_violations(config, self.shape, self.limits)
        if problems:
            raise UsageError(" ".join(problems))
        return replace(self, config=config)

    def compile(self) -> "CompiledCode":
        """Return the code of the config, compiled in a process of its own since a compile may abort its process.

        Raises:
            NoFeasibleConfigError: the config does not compile.
        """
        from blocktune.tuner.compile_server.one_config import compile_config

        note(f"compiling {self.config.label} for compute capability {self.limits.name} ({self.shape.label})")
        return compile_config(self.config, self.shape, self.limits)


def default_request(name: str, shape: "AttentionShape", limits: "ComputeLimits") -> CompileRequest:
    """Return the request for a kernel's default config.

    Raises:
        UnknownKernelError: no kernel has this name.
        UsageError: the kernel does not compute this shape there.
    """
    from blocktune.kernels.registry import get_kernel

    kernel = get_kernel(name)
    reason = kernel.unsupported(shape, limits)
    if reason is not None:
        raise UsageError(reason)
    return CompileRequest(kernel, kernel.default_config(shape, limits), shape, limits)


def _parameter(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value)
    except ValueError:
        raise UsageError(f"`--param` must be NAME=VALUE with an integer value, but got {text!r:.80}.") from None
