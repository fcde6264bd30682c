"""`tune occupancy`: how many blocks of a kernel fit a multiprocessor, what limits them, what would lift the limit."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.options import AsJson, DeviceName, Dtype, IsCausal, device_asked_for
from blocktune.cli.render import note, print_json
from blocktune.kernels.errors import NoFeasibleConfigError, UsageError
from blocktune.tuner.defaults import complete_shape

if TYPE_CHECKING:
    from blocktune.kernels.config import KernelConfig
    from blocktune.kernels.device import ComputeLimits
    from blocktune.kernels.kernel import AttentionKernel
    from blocktune.kernels.resources import KernelResources
    from blocktune.kernels.shape import AttentionShape
    from blocktune.tuner.occupancy import Occupancy

Parameter = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the kernel's own; may be repeated."),
]


def occupancy(
    cc: Annotated[str | None, typer.Option("--cc", help="Compute capability, such as 9.0.")] = None,
    device: DeviceName = None,
    warps: Annotated[int | None, typer.Option("--warps", min=1, help="Warps of a block.")] = None,
    regs: Annotated[int | None, typer.Option("--regs", min=0, help="Registers of a thread.")] = None,
    shared: Annotated[int | None, typer.Option("--shared", min=0, help="Dynamic shared bytes of a block.")] = None,
    static_shared: Annotated[int, typer.Option("--static-shared", min=0, help="Static shared bytes of a block.")] = 0,
    barriers: Annotated[int, typer.Option("--barriers", min=0, help="Named barriers of a block.")] = 1,
    carveout: Annotated[
        int | None, typer.Option("--carveout", min=0, max=100, help="Shared memory's part of the L1, in percent.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", help="Compile this kernel instead of giving --regs.")
    ] = None,
    block_m: Annotated[int | None, typer.Option("--block-m", help="Query rows of a tile.")] = None,
    block_n: Annotated[int | None, typer.Option("--block-n", help="Key rows of a tile.")] = None,
    stages: Annotated[int | None, typer.Option("--stages", help="Pipeline stages.")] = None,
    param: Parameter = None,
    dim: Annotated[int | None, typer.Option("--dim", min=1, help="Head dimension to compile for.")] = None,
    seq: Annotated[int, typer.Option("--seq", min=1, help="Sequence length to compile for.")] = 8192,
    dtype: Dtype = "bf16",
    causal: IsCausal = False,
    as_json: AsJson = False,
) -> None:
    """Explain how many blocks fit an SM, and why.

    From the resources of a block, or of a kernel that is compiled here, which needs no GPU.

    \b
    tune occupancy --cc 9.0 --warps 4 --regs 168 --shared 115712
    tune occupancy --device h200 --kernel flash_fwd --block-m 128 --block-n 64 --warps 4 --stages 3 --dim 128
    """
    from blocktune.tuner.occupancy import occupancy as compute
    from blocktune.tuner.occupancy_text import explain

    limits, num_sms = _where(cc, device)
    if kernel is None:
        subject = None
        resources = _resources_given(warps, regs, shared, static_shared, barriers)
    else:
        choices = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
        subject = _subject(kernel, choices, param or [], _shape_to_compile(seq, dim, dtype, causal), limits)
        resources = _compile(subject)
    result = compute(resources, limits, carveout_percent=carveout)
    text = explain(result) if subject is None else subject.explain(result, num_sms)
    if as_json:
        print_json(({} if subject is None else subject.to_json()) | result.to_json() | {"explanation": text})
    else:
        typer.echo(text)


def _where(cc: str | None, device: str | None) -> tuple["ComputeLimits", int | None]:
    """The limits that are asked about, and how many SMs have them where a device is meant."""
    from blocktune.kernels.device import limits_for, parse_cc

    if cc is None:
        spec = device_asked_for(device)
        return spec.limits, spec.num_sms
    if device is not None:
        raise UsageError("Give `--cc` or `--device`, not both: a device has its own compute capability.")
    return limits_for(parse_cc(cc)), None


def _resources_given(
    warps: int | None, regs: int | None, shared: int | None, static_shared: int, barriers: int
) -> "KernelResources":
    from blocktune.kernels.resources import KernelResources

    if warps is None or regs is None or shared is None:
        raise UsageError(
            "Occupancy needs `--warps`, `--regs` and `--shared`, or a `--kernel` to compile. "
            "Example: tune occupancy --cc 9.0 --warps 4 --regs 168 --shared 115712"
        )
    return KernelResources(
        registers=regs,
        shared_bytes=shared,
        static_shared_bytes=static_shared,
        num_warps=warps,
        barriers=barriers,
        tensor_cores="none",
    )


def _shape_to_compile(seq: int, dim: int | None, dtype: str, causal: bool) -> "AttentionShape":
    if dim is None:
        raise UsageError("`--kernel` compiles for a head dimension, but `--dim` is missing. Add, say, `--dim 128`.")
    return complete_shape(seq, dim, dtype=dtype, causal=causal)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is compiled, and for what."""

    kernel: "AttentionKernel"
    config: "KernelConfig"
    shape: "AttentionShape"
    limits: "ComputeLimits"

    def to_json(self) -> dict[str, Any]:
        return {"config": self.config.to_json(), "shape": self.shape.to_json()}

    def explain(self, result: "Occupancy", num_sms: int | None) -> str:
        """The occupancy in words, with what smaller parameters would change and the waves on a device."""
        from blocktune.tuner.occupancy import Waves
        from blocktune.tuner.occupancy_text import explain
        from blocktune.tuner.visits import visits_of

        waves = None
        if num_sms is not None and result.blocks_per_sm:
            tiles = visits_of(self.shape, self.config.block_m, self.config.block_n).query_tiles
            grid = tiles * self.shape.batch * self.shape.num_heads
            waves = Waves(grid_blocks=grid, resident_blocks=result.blocks_per_sm * num_sms)
        return explain(result, alternatives=self._alternatives(), waves=waves)

    def _alternatives(self) -> dict[str, int]:
        """The shared bytes of a block after one step down of one parameter, by the step's name."""
        from blocktune.kernels.config import KernelConfig

        found = {}
        now = self.config.parameters
        for name, choices in self.kernel.parameters.items():
            lower = max((choice for choice in choices if choice < now[name]), default=None)
            if lower is not None:
                config = KernelConfig.of(self.config.kernel, now | {name: lower})
                found[f"{name} {now[name]}→{lower}"] = self.kernel.shared_bytes(config, self.shape, self.limits)
        return found


def _subject(
    name: str, choices: dict[str, int | None], own: list[str], shape: "AttentionShape", limits: "ComputeLimits"
) -> _Subject:
    """The kernel's default config with the given choices in place of its own."""
    from blocktune.kernels.config import KernelConfig
    from blocktune.kernels.registry import get_kernel

    kernel = get_kernel(name)
    reason = kernel.unsupported(shape, limits)
    if reason is not None:
        raise UsageError(reason)
    given = {key: value for key, value in choices.items() if value is not None} | dict(map(_parameter, own))
    unknown = sorted(set(given) - set(kernel.parameters))
    if unknown:
        raise UsageError(f"`{name}` has the parameters {', '.join(kernel.parameters)}, but got {', '.join(unknown)}.")
    config = KernelConfig.of(name, kernel.default_config(shape, limits).parameters | given)
    return _Subject(kernel, config, shape, limits)


def _parameter(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value)
    except ValueError:
        raise UsageError(f"`--param` is NAME=VALUE with an integer value, but got {text!r}.") from None


def _compile(subject: _Subject) -> "KernelResources":
    """The resources of the config, compiled in a process of its own since a compile may abort its process.

    Raises:
        NoFeasibleConfigError: the config does not compile.
    """
    from blocktune.tuner.compile_farm import CompileFarm

    config, limits = subject.config, subject.limits
    note(f"compiling {config.label} for compute capability {limits.name} ({subject.shape.label})")
    with CompileFarm(workers=1) as farm:
        result = farm.submit(config.kernel, config, subject.shape, limits.cc).result()
    if result.resources is None:
        raise NoFeasibleConfigError(
            f"{config.label} does not compile for compute capability {limits.name} ({result.outcome}): {result.error}"
        )
    return result.resources
