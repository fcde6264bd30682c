"""`tune run MODULE:KERNEL`: a kernel tuned without its program, on arguments that a function of the user's makes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.autotuned.arguments import (
    Sizes,
    arguments_for,
    choices,
    function_of,
    grid_of,
    importable_from_here,
)
from blocktune.cli.autotuned.rows import parameters
from blocktune.cli.output.render import microseconds, note, print_json, say
from blocktune.cli.shared.stores import database_of_this_process
from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from blocktune.kernels.tuned.fallback import KernelExplanation
    from blocktune.kernels.tuned.kernel import TunedKernel

ArgumentsOf = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="MODULE:FUNCTION",
        help="Function that returns the kernel's arguments by name, for the sizes of --grid.",
    ),
]
Space = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE,VALUE", help="Values to try instead of the kernel's own list."),
]
Expand = Annotated[int, typer.Option("--expand", min=0, help="How many configs to try beyond the kernel's list.")]


def run_kernel(
    name: str,
    make: str | None,
    grid: str | None,
    param: Sequence[str],
    expand: int,
    db: str | None,
    *,
    as_json: bool,
) -> None:
    """Tune a kernel for each size of a grid.

    Raises:
        UsageError: a name is none, or the arguments do not fit.
        NoDeviceError: there is no GPU.
    """
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.tuned.decide import needing_a_gpu

    with importable_from_here(), database_of_this_process(db):
        kernel, all_sizes, arguments = kernel_and_arguments(name, make, grid, param, expand)
        with needing_a_gpu(kernel.name):
            device, found = current_device(), []
        for sizes in all_sizes:
            choice = _tuned(kernel, arguments(sizes))
            found.append(choice_json(sizes, choice))
            if not as_json:
                _show(sizes, choice)
    if as_json:
        print_json({"device": device.name, "kernel": kernel.name, "tuned": found})


def kernel_and_arguments(
    name: str, make: str | None, grid: str | None, param: Sequence[str], expand: int
) -> "tuple[TunedKernel, list[Sizes], Callable[[Sizes], dict[str, Any]]]":
    """Return a kernel, the sizes of a grid, and what makes the arguments of each: those of all at once may not fit.

    Raises:
        UsageError: a name is none.
    """
    from blocktune.tuner.tuned.autotune import space
    from blocktune.tuner.tuned.named import kernel_named

    if make is None:
        raise UsageError(
            f"{name} is measured on arguments, but nothing makes them. Name a function: `--args my_module:make_args`, "
            'which returns them by name, `{"x": x, "n": n, "grid": (128,)}`.'
        )
    sizes, named = grid_of(grid), choices(param)
    kernel = kernel_named(name, space(**named) if named else (), list(sizes[0]), expand)
    return kernel, sizes, partial(arguments_for, make, function_of(make))


def _tuned(kernel: "TunedKernel", arguments: Mapping[str, Any]) -> "KernelExplanation":
    from blocktune.tuner.tuned.named import positional

    args, kwargs = positional(kernel, arguments)
    return kernel.explain(*args, **kwargs)


def choice_json(sizes: Sizes, choice: "KernelExplanation") -> dict[str, Any]:
    """Return the choice of a call as plain values."""
    return {
        "sizes": dict(sizes),
        "key": dict(choice.shape.arguments) if choice.shape else {},
        "config": choice.label,
        "rung": str(choice.rung),
        "time_us": choice.time_us,
        "default_time_us": choice.default_time_us,
        "rates": choice.rates,
        "measured_now": choice.tuned,
        "seconds": choice.seconds,
        "dropped": dict(choice.dropped or {}),
    }


def _show(sizes: Sizes, choice: "KernelExplanation") -> None:
    words = " ".join(f"{name}={value}" for name, value in sizes.items())
    gain = ""
    if choice.time_us and choice.default_time_us:
        gain = f", {choice.default_time_us / choice.time_us:.3f} times as fast as the first of the list"
    say(f"{words or choice.subject}: {parameters(choice.label)}, {microseconds(choice.time_us)}{gain}")
    note(f"measured now in {choice.seconds:.1f} s" if choice.tuned else f"known before: {choice.rung}")
    if choice.rates:
        note(choice.rates)
    for label, reason in (choice.dropped or {}).items():
        note(f"dropped {parameters(label)}: {reason}")
