"""Calls of attention with special values, each against attention in float64 and against PyTorch in the same type.

As a program it reads names of cases, one a line, and writes a report of each as one line of JSON. A case that breaks
the CUDA context ends the program, and with it no other case.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.dispatch.dispatcher import attention

DEVICE = "cuda"
OUTPUTS = ("out", "dq", "dk", "dv")


class Sizes(NamedTuple):
    """batch, query heads, key heads, queries, keys, head_dim of queries and keys, and of values."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    dim: int
    dim_v: int


@dataclass(frozen=True)
class Case:
    """One call. mask: what it broadcasts over, `full`, `queries` (shared by the keys) or `keys`. layout: `plain`,
    `expanded` (one head for all), `odd` (rows of an odd stride) or `turned` (the last dimension is not contiguous).
    infinity: what stands in one element of some keys. hides: all queries meet it with a positive element.
    precision: what torch.set_float32_matmul_precision is called with.
    pytorch: whether PyTorch's default choice of a backend may be run, which breaks the context for some masks."""

    name: str
    sizes: Sizes
    dtype: str = "bfloat16"
    is_causal: bool = False
    scale: float | None = None
    mask: str = ""
    mask_dtype: str = "float32"
    mask_gradient: bool = False
    layout: str = "plain"
    infinity: float = 0.0
    hides: bool = False
    factor: float = 1.0
    precision: str = "highest"
    pytorch: bool = True

    def rounding(self, output: str) -> float:
        """What of a result's size is rounding. Of huge scores in 16 bits a gradient is only known to have the size that
        probabilities between 0 and 1 give it, since it is computed again from a rounded log-sum-exp."""
        eps = torch.finfo(getattr(torch, self.dtype)).eps
        if self.factor == 1.0 or output not in OUTPUTS[1:]:
            return eps
        return 8 * eps if self.dtype == "float32" else 2.0


@dataclass
class Report:
    """The largest errors of a case by result, where float64 is finite; `sizes` are float64's largest values there, and
    of huge scores those of what is added up."""

    name: str
    served: list[str] = field(default_factory=list)
    ours: dict[str, float] = field(default_factory=dict)
    pytorch: dict[str, float] = field(default_factory=dict)
    mathematics: dict[str, float] = field(default_factory=dict)
    formula: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    pytorch_problem: str = ""
    ends_process: bool = False
    """Whether the GPU computes nothing more for this process."""

    def bound(self, output: str, rounding: float) -> float:
        """Three times the error of PyTorch's own choice, or of its mathematics where the choice is not finite, or of
        the formula in float32 where neither is; and rounding."""
        errors = (self.pytorch.get(output, math.inf), self.mathematics[output], self.formula[output])
        return 3 * next(filter(math.isfinite, errors)) + rounding * self.sizes[output]


SCALE = -0.2
MASKED = (
    ("d80", Sizes(1, 12, 12, 512, 512, 80, 80), "bfloat16", "full", 1.0),
    ("d8-over-queries", Sizes(7, 16, 1, 3, 5, 8, 8), "float16", "queries", None),
    ("d80-256", Sizes(7, 5, 1, 343, 343, 80, 256), "float16", "full", None),
    ("d120", Sizes(2, 8, 8, 134, 134, 120, 120), "bfloat16", "full", SCALE),
    ("d224", Sizes(3, 40, 8, 16, 16, 224, 224), "float16", "full", SCALE),
    ("d256-136", Sizes(3, 8, 8, 2015, 418, 256, 136), "bfloat16", "full", SCALE),
)
SPREAD = (("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"))


def _cases() -> list[Case]:
    keys = [
        Case("k-inf-d256", Sizes(1, 12, 12, 256, 256, 256, 256), is_causal=True, infinity=-math.inf),
        Case("k-inf-d40", Sizes(7, 40, 8, 512, 512, 40, 40), is_causal=True, infinity=-math.inf),
        Case("k+inf-d128", Sizes(3, 40, 8, 128, 128, 128, 128), is_causal=True, infinity=math.inf),
        Case("k-inf-d64-short", Sizes(2, 4, 4, 200, 200, 64, 64), is_causal=True, infinity=-math.inf),
        Case("k-inf-d128-full", Sizes(2, 4, 4, 512, 512, 128, 128), infinity=-math.inf),
        Case("k-inf-d96", Sizes(2, 4, 4, 384, 384, 96, 96), is_causal=True, infinity=-math.inf),
        Case("k-inf-fp32", Sizes(2, 4, 4, 256, 256, 64, 64), "float32", is_causal=True, infinity=-math.inf),
    ]
    keys += [Case(**vars(case) | {"name": f"{case.name}-hides", "hides": True}) for case in keys if case.infinity < 0]
    large = [
        Case("large-1e8", Sizes(2, 28, 4, 512, 512, 96, 96), "float32", factor=1e4),
        Case("large-1e8-causal", Sizes(2, 28, 4, 512, 512, 96, 96), "float32", is_causal=True, factor=1e4),
        Case("large-1e5", Sizes(7, 6, 2, 3, 3, 129, 129), "float32", factor=316.0),
        Case("large-bf16", Sizes(2, 28, 4, 512, 512, 96, 96), factor=1e3, is_causal=True),
        Case("large-fp16", Sizes(2, 4, 4, 512, 512, 128, 128), "float16", factor=100.0, is_causal=True),
    ]
    exact = [
        Case(f"fp32-{level}-{label}", Sizes(2, heads, heads_kv, 512, 512, 128, 128), "float32", is_causal=True,
             precision=level)
        for level in ("highest", "high")
        for label, heads, heads_kv in (("grouped", 8, 2), ("each", 4, 4))
    ]  # fmt: skip
    layouts = [
        Case(f"mask-{label}-{layout}", sizes, dtype, mask=mask, scale=scale, layout=layout)
        for label, sizes, dtype, mask, scale in MASKED
        for layout in ("plain", "expanded", "odd", "turned")
    ]
    scales = [
        Case(f"negative-{mask_dtype}-{label}", sizes, dtype, mask=mask, mask_dtype=mask_dtype, scale=SCALE)
        for label, sizes, dtype, mask, _ in MASKED
        for mask_dtype in ("bool", "float32")
    ]
    plain = [
        Case(f"negative-plain-{label}", Sizes(2, 4, 2, 257, 257, 64, 64), dtype, is_causal=True, scale=SCALE)
        for label, dtype in SPREAD
    ]
    # PyTorch's memory-efficient backend reads such masks at a misaligned address
    shared = [
        Case(
            f"shared-mask-{name}-{mask_dtype}-d{dim}", Sizes(2, 4, 4, 129, 131, dim, dim), dtype, mask="queries",
            mask_dtype=mask_dtype, mask_gradient=gradient, layout=layout, pytorch=False,
        )
        for name, dtype in SPREAD
        for mask_dtype in sorted({dtype, "float32", "bool"})
        for dim, gradient, layout in ((64, False, "plain"), (64, False, "turned"), (320, False, "plain"))
        + (((72, True, "plain"),) if mask_dtype != "bool" else ())
    ]  # fmt: skip
    shared = [Case(**vars(case) | {"name": f"{case.name}-{case.layout}"}) for case in shared]
    return [*keys, *large, *exact, *layouts, *scales, *plain, *shared]


CASES = {case.name: case for case in _cases()}


def tensors_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """query, key, value and mask of a case on the GPU."""
    torch.manual_seed(0)
    own = case.sizes
    query = _make(case, own.heads, own.seqlen_q, own.dim)
    key = _make(case, own.heads_kv, own.seqlen_k, own.dim)
    value = _make(case, own.heads_kv, own.seqlen_k, own.dim_v)
    if case.infinity:
        rows = torch.arange(0, own.seqlen_k, 64, device=DEVICE)  # where tiles begin
        rows = torch.cat([rows, torch.randint(own.seqlen_k, (4,), device=DEVICE)])
        if case.hides:
            query[..., 0] = query[..., 0].abs() + 0.5
        columns = torch.randint(1 if case.hides else own.dim, rows.shape, device=DEVICE)
        key[..., rows, columns] = case.infinity
    return query, key, value, _mask_of(case)


def _make(case: Case, heads: int, length: int, dim: int) -> Tensor:
    dtype, batch = getattr(torch, case.dtype), case.sizes.batch
    if case.layout == "expanded":
        made = torch.randn(batch, 1, length, dim, device=DEVICE).to(dtype).expand(-1, heads, -1, -1)
    elif case.layout == "odd":
        made = torch.randn(batch, heads, length, dim + 3, device=DEVICE).to(dtype)[..., :dim]
    elif case.layout == "turned":
        made = torch.randn(batch, heads, dim, length, device=DEVICE).to(dtype).mT
    else:
        made = torch.randn(batch, heads, length, dim, device=DEVICE).to(dtype)
    return made * case.factor if case.factor != 1.0 else made


def _mask_of(case: Case) -> Tensor | None:
    own = case.sizes
    if not case.mask:
        return None
    rows, columns = (own.seqlen_q, 1) if case.mask == "queries" else (own.seqlen_q, own.seqlen_k)
    if case.mask_dtype == "bool":
        return torch.rand(rows, columns, device=DEVICE) < 0.7
    mask = torch.randn(rows, columns, device=DEVICE)
    hidden = torch.rand(rows, columns, device=DEVICE) < 0.3
    mask = mask.masked_fill(hidden, torch.finfo(torch.float32).min if case.mask != "queries" else -5.0)
    return mask.to(getattr(torch, case.mask_dtype)).requires_grad_(case.mask_gradient)


def reference(case: Case, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in float64, with PyTorch's upper-left triangle, and zeros where a query sees no key."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if case.scale is None else case.scale)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype is torch.bool else scores + mask.to(scores.dtype)
    if case.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(seen, scores, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(blind, 0.0, torch.where(blind, 0.0, scores).softmax(-1)) @ value


def results(attend: Any, leaves: list[Tensor], grad: Tensor | None) -> dict[str, Tensor]:
    """The output, and the gradients if one of the output is given."""
    if grad is None:
        with torch.no_grad():
            return {"out": attend(*leaves)}
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    out = attend(*own)
    return dict(zip(OUTPUTS, (out.detach(), *torch.autograd.grad(out, own, grad.to(out.dtype))), strict=True))


def errors(got: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """The largest errors where the right result is finite; inf where something is not finite there."""
    found = {}
    for name, tensor in got.items():
        finite = right[name].isfinite()
        gap = (tensor.double() - right[name]).abs()[finite]
        found[name] = math.inf if not gap.isfinite().all() else gap.max().item() if gap.numel() else 0.0
    return found


def examine(case: Case) -> Report:
    """The report of a case: ours first, since PyTorch may break the context."""
    torch.set_float32_matmul_precision(case.precision)
    report = Report(case.name)
    *leaves, mask = tensors_of(case)
    out_shape = (*leaves[0].shape[:3], case.sizes.dim_v)
    grad = torch.randn(out_shape, device=DEVICE).to(leaves[0].dtype)
    options: dict[str, Any] = {"is_causal": case.is_causal, "scale": case.scale, "enable_gqa": True}

    def ours(*own: Tensor) -> Tensor:
        return attention(*own, mask, **options)

    def pytorchs(*own: Tensor) -> Tensor:
        return scaled_dot_product_attention(*own, mask, **options)

    def formula(*own: Tensor) -> Tensor:
        return reference(case, *own, mask)

    wide = [leaf.double() for leaf in leaves]
    right = results(formula, wide, grad.double())
    report.formula = errors(results(formula, [leaf.float() for leaf in leaves], grad.float()), right)
    report.formula["inference"] = report.formula["out"]
    report.sizes = {name: _largest(tensor) for name, tensor in right.items()}
    if case.factor != 1.0:
        report.sizes |= _added_up(case, wide, grad.double())
    try:
        report.served.append(attention.explain(*leaves, mask, **options).headline)
        inference = errors(results(ours, leaves, None), right)
        with torch.enable_grad():
            asked = [leaf.detach().requires_grad_() for leaf in leaves]
            report.served.append(attention.explain(*asked, mask, **options).headline)
        report.ours = errors(results(ours, leaves, grad), right) | {"inference": inference["out"]}
        report.sizes["inference"] = report.sizes["out"]
        torch.cuda.synchronize()
    except Exception as error:  # whatever it is belongs to this case
        report.problem = f"{type(error).__name__}: {error}"
        report.ends_process = _is_dead()
        return report
    with sdpa_kernel(SDPBackend.MATH):
        report.mathematics = errors(results(pytorchs, leaves, grad), right)
        report.mathematics["inference"] = report.mathematics["out"]
    try:
        if case.pytorch and case.precision == "highest":  # its fused kernels follow no setting
            report.pytorch = errors(results(pytorchs, leaves, grad), right)
            report.pytorch |= {"inference": errors(results(pytorchs, leaves, None), right)["out"]}
            torch.cuda.synchronize()
    except Exception as error:
        report.pytorch_problem = f"{type(error).__name__}: {error}"
        report.ends_process = _is_dead()
    return report


def _added_up(case: Case, leaves: list[Tensor], grad: Tensor) -> dict[str, float]:
    """The sizes of what dq and dk are sums of: where all probabilities are 0 or 1, these cancel."""
    query, key, value = leaves
    terms = _largest(grad @ value.repeat_interleave(grad.shape[1] // value.shape[1], 1).mT) * query.shape[-1] ** -0.5
    return {"dq": terms * _largest(key), "dk": terms * _largest(query)}


def _is_dead() -> bool:
    """Whether an error has ended the context: some libraries report it by a code of their own."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def main() -> None:
    for line in sys.stdin:
        report = examine(CASES[line.strip()])
        print(json.dumps(asdict(report)), flush=True)
        if report.ends_process:
            sys.exit(1)


if __name__ == "__main__":
    main()
