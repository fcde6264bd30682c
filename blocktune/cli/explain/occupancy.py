"""`tune occupancy`: how many blocks of a kernel fit a multiprocessor, what limits them, what would lift the limit."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.offline.calls import Call, CallOutput, explain_call, refuse_beside_call
from blocktune.cli.offline.kernel import code_json, compile_by_name, has_list, show_configs
from blocktune.cli.output.render import print_json, print_styled, say, terminal_width
from blocktune.cli.shared import completion
from blocktune.cli.shared.compiled_config import BlockM, BlockN, CompileRequest, OwnParameters, Stages, default_request
from blocktune.cli.shared.options import AsJson, DeviceName, Dtype, IsCausal, Signature
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import ComputeLimits
    from blocktune.kernels.hardware.resources import KernelResources
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.occupancy.calculator import Occupancy


def occupancy(
    context: typer.Context,
    autotuned: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:KERNEL", help="Compile a jitted function that can be imported from here."),
    ] = None,
    signature: Signature = None,
    call: Call = None,
    cc: Annotated[str | None, typer.Option("--cc", help="Compute capability, such as 9.0.")] = None,
    device: DeviceName = None,
    warps: Annotated[int | None, typer.Option("--warps", min=1, help="Warps per block.")] = None,
    regs: Annotated[int | None, typer.Option("--regs", min=0, help="Registers per thread.")] = None,
    shared: Annotated[int | None, typer.Option("--shared", min=0, help="Dynamic shared bytes per block.")] = None,
    static_shared: Annotated[int, typer.Option("--static-shared", min=0, help="Static shared bytes per block.")] = 0,
    barriers: Annotated[int, typer.Option("--barriers", min=0, help="Named barriers per block.")] = 1,
    carveout: Annotated[
        int | None,
        typer.Option("--carveout", min=0, max=100, help="Shared memory's share of the L1 cache, in percent."),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel", help="Compile this kernel instead of giving --regs.", autocompletion=completion.kernels
        ),
    ] = None,
    block_m: BlockM = None,
    block_n: BlockN = None,
    stages: Stages = None,
    param: OwnParameters = None,
    dim: Annotated[int | None, typer.Option("--dim", min=1, help="Head dimension to compile for.")] = None,
    seq: Annotated[int, typer.Option("--seq", min=1, help="Sequence length to compile for.")] = 8192,
    dtype: Dtype = "bf16",
    causal: IsCausal = False,
    plot: Annotated[bool, typer.Option("--plot", help="Also draw the number of blocks over each resource.")] = False,
    as_json: AsJson = False,
) -> None:
    """Explain how many blocks fit an SM, and why.

    Give the resources of a block, or a kernel to compile, which needs no GPU. Kernels for decoding or features need a
    whole shape: see `tune explain`. Of an autotuned kernel, without --param, every config of its list is a row.

    \b
    tune occupancy --cc 9.0 --warps 4 --regs 168 --shared 115712 --plot
    tune occupancy --device h200 --kernel flash_fwd --block-m 128 --block-n 64 --warps 4 --stages 3 --dim 128
    tune occupancy my_kernels:matmul --signature '*bf16,*bf16,*bf16,i32:16,i32:16,i32:16' --param BLOCK_M=128
    tune occupancy --call my_bench:step --device h200,a100
    """
    from blocktune.tuner.occupancy.calculator import occupancy as compute
    from blocktune.tuner.occupancy.text import text_of_occupancy

    if call is not None:
        refuse_beside_call(context)
        explain_call(call, device, CallOutput(as_json=as_json, brief=True))
        return
    if autotuned is not None:
        _refuse_resources(regs, shared, static_shared, barriers)
        options = {"num_warps": warps, "num_stages": stages}
        if not (param or warps or stages or plot) and has_list(autotuned):
            limits, _ = _target_limits(cc, device)
            show_configs(autotuned, signature, limits, choose_device(device) if cc is None else None, as_json=as_json)
            return
        code = compile_by_name(autotuned, signature, options, param or [], _target_limits(cc, device)[0])
        if as_json:
            print_json(code_json(code) | _json(code.occupancy, plot) | {"explanation": str(code)})
            return
        say(str(code))
        if plot:
            _draw(code.occupancy)
        return
    limits, num_sms = _target_limits(cc, device)
    if kernel is None:
        request = None
        resources = _given_resources(warps, regs, shared, static_shared, barriers)
    else:
        _refuse_resources(regs, shared, static_shared, barriers)
        choices = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
        request = default_request(kernel, _shape_to_compile(kernel, seq, dim, dtype, causal), limits)
        request = request.with_choices(choices, param or [])
        resources = request.compile().resources
    result = compute(resources, limits, carveout_percent=carveout)
    text = text_of_occupancy(result) if request is None else _explain(request, result, num_sms)
    if as_json:
        print_json(({} if request is None else request.to_json()) | _json(result, plot) | {"explanation": text})
        return
    say(text)
    if plot:
        _draw(result)


def _json(result: "Occupancy", plot: bool) -> dict[str, Any]:
    from blocktune.tuner.occupancy.curves import curves_of

    curves = {name: curve.to_json() for name, curve in curves_of(result).items()} if plot else {}
    return result.to_json() | ({"curves": curves} if plot else {})


def _draw(result: "Occupancy") -> None:
    from blocktune.cli.explain.occupancy_plot import plot_lines
    from blocktune.tuner.occupancy.curves import curves_of

    say("")
    print_styled(plot_lines(curves_of(result), terminal_width()))


def _target_limits(cc: str | None, device: str | None) -> tuple["ComputeLimits", int | None]:
    """Return the limits of the given target, and how many SMs have them where it is a device."""
    from blocktune.kernels.hardware.device import limits_for, parse_cc

    if cc is None:
        spec = choose_device(device)
        return spec.limits, spec.num_sms
    if device is not None:
        raise UsageError("Give `--cc` or `--device`, not both: a device has its own compute capability.")
    return limits_for(parse_cc(cc)), None


def _given_resources(
    warps: int | None, regs: int | None, shared: int | None, static_shared: int, barriers: int
) -> "KernelResources":
    from blocktune.kernels.hardware.resources import KernelResources

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


def _refuse_resources(regs: int | None, shared: int | None, static_shared: int, barriers: int) -> None:
    """Refuse flags that a compiled kernel would silently ignore."""
    given = {"--regs": regs, "--shared": shared, "--static-shared": static_shared or None}
    given["--barriers"] = None if barriers == 1 else barriers
    surplus = [name for name, value in given.items() if value is not None]
    if surplus:
        raise UsageError(
            f"A `--kernel` is compiled, which gives its resources, but {' and '.join(surplus)} "
            f"{'is' if len(surplus) == 1 else 'are'} given too. Leave out the kernel or the resources."
        )


def _shape_to_compile(kernel: str, seq: int, dim: int | None, dtype: str, causal: bool) -> "AttentionShape":
    """Return the shape in the direction that the kernel computes."""
    from blocktune.kernels.registry import get_kernel

    if dim is None:
        raise UsageError("`--kernel` compiles for a head dimension, but `--dim` is missing. Add, say, `--dim 128`.")
    return replace(complete_shape(seq, dim, dtype=dtype, causal=causal), direction=get_kernel(kernel).direction)


def _explain(request: CompileRequest, result: "Occupancy", num_sms: int | None) -> str:
    """Return the occupancy in words, with what smaller parameters would change and the waves on a device."""
    from blocktune.tuner.cost.analysis import steps_down
    from blocktune.tuner.cost.roofline import waves_of
    from blocktune.tuner.occupancy.text import text_of_occupancy

    waves = None
    if num_sms is not None and result.blocks_per_sm:
        blocks, folded = request.kernel.as_forward(request.config, request.shape)
        waves = waves_of(folded, blocks.block_m, result, num_sms)
    alternatives = steps_down(request.kernel, request.config, request.shape, request.limits)
    return text_of_occupancy(result, alternatives=alternatives, waves=waves)
