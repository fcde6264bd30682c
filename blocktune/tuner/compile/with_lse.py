"""The code of a launch that also writes the log-sum-exp, which the timed launches of a search leave out."""

from dataclasses import replace

from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import compiled_code

LSE = "lse"
"""The parameter of a function that writes it, in whichever case."""

LSE_TYPE = "*fp32"


def with_lse(spec: CompileSpec) -> CompileSpec | None:
    """Return the spec of a launch that writes the log-sum-exp; None where the function has no such parameter, or always
    writes it."""
    names = list(spec.signature)
    place = next((place for place, name in enumerate(names) if name.lower() == LSE), None)
    if place is None or spec.signature[names[place]] != "constexpr":
        return None
    tensor = next(place for place, name in enumerate(names) if spec.signature[name].startswith("*"))
    return replace(
        spec,
        signature={**spec.signature, names[place]: LSE_TYPE},
        constexprs={at: value for at, value in spec.constexprs.items() if at != (place,)},
        attrs=dict(sorted({**spec.attrs, (place,): spec.attrs[tensor,]}.items())),  # aligned as any tensor is
    )


def compile_with_lse(kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]) -> None:
    """Compile in this process what a launch with log-sum-exp looks up, where that is other code; raises what
    `compile_config` raises. Where a further function has the parameter, it merges, and it alone writes."""
    specs = (*kernel.further_specs(config, shape), kernel.compile_spec(config, shape))
    writing = next(filter(None, map(with_lse, specs)), None)
    if writing is not None:
        compiled_code(writing, cc)
