"""One case: the call, the truth, and what is to be said about it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tools.differential.calls.calls import calls_of
from tools.differential.calls.problems import Calls, Subject, in_type
from tools.differential.calls.tools import with_tools
from tools.differential.cases.case import Case
from tools.differential.cases.enums import CAPTURED, COMPILED, Mode, Values
from tools.differential.cases.tensors import Inputs, inputs_of
from tools.differential.runs.circumstances import call_results, enter_mode, leaves_of
from tools.differential.truth.bounds import Comparison, compare_errors
from tools.differential.truth.oracle import Problem, attention, truth_of
from tools.differential.truth.refusals import refusal
from tools.differential.truth.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case. served: the kernels that ran, `pytorch` among them."""

    verdict: Verdict
    message: str = ""
    served: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = field(default=())

    @property
    def ratio(self) -> float:
        """The largest error over its bound."""
        return max((each.ratio for each in self.comparisons), default=0.0)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"verdict": self.verdict, "ratio": self.ratio, "served": list(self.served)}
        if self.message:
            document["message"] = self.message
        if self.verdict is Verdict.WRONG:
            document["comparisons"] = [asdict(each) for each in self.comparisons if not each.is_right]
        return document


def run_case(case: Case, device: torch.device, subject: Subject, on_error: Callable[[str], None]) -> Outcome:
    """Calls, computes the truth and compares. Errors of CUDA that end its context are raised.

    on_error: gets what ours has raised, before PyTorch is asked for the same call.
    """
    if case.kind.refusals:
        return _judge_refusal(case, device, subject, on_error)
    inputs = inputs_of(case, device)
    calls = calls_of(case, inputs, with_tools(case, subject))
    try:
        results = call_results(case, inputs, calls.ours)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if is_lost(device):
            raise
        if case.mode in COMPILED:
            torch.compiler.reset()  # what it has begun to capture would meet the next case
        on_error(_named(error))
        return Outcome(_verdict_of_error(case, inputs, calls, error), _named(error))
    outcome = _judged(case, inputs, calls, results)
    if outcome.verdict is Verdict.WRONG and _is_pytorchs(case, inputs, calls, results):
        return replace(outcome, verdict=Verdict.INHERITED)
    return outcome


def _is_pytorchs(case: Case, inputs: Inputs, calls: Calls, results: list[tuple[Tensor, ...]]) -> bool:
    """Whether PyTorch's attention by its own choice of backend gives the same to the bit."""
    if calls.default is None:
        return False
    defaults = call_results(case, inputs, calls.default)
    return all(
        torch.equal(ours.nan_to_num(7.0), own.nan_to_num(7.0))
        for result, default in zip(results, defaults, strict=True)
        for ours, own in zip(result, default, strict=True)
    )


def is_lost(device: torch.device) -> bool:
    """Whether the CUDA context has ended: every further call fails."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # whatever it is called: the question is whether anything runs
        return True
    return False


def _verdict_of_error(case: Case, inputs: Inputs, calls: Calls, error: Exception) -> Verdict:
    """Ours has raised: that is right where PyTorch raises, too, and where the documents say so."""
    if case.mode is Mode.DTENSOR and isinstance(error, ValueError) and "DTensor" in str(error):
        return Verdict.REFUSED
    default = calls.default
    if default is None:
        return Verdict.RAISED
    theirs = _error_of(lambda: call_results(case, inputs, default), inputs.query.tensor.device)
    if theirs is None:
        return Verdict.RAISED
    return Verdict.REFUSED if isinstance(error, type(theirs)) else Verdict.OTHER_ERROR


def _judge_refusal(case: Case, device: torch.device, subject: Subject, on_error: Callable[[str], None]) -> Outcome:
    """A wrong call: PyTorch's default and ours must both raise, or neither.

    PyTorch's fused backends take the number of keys from the key alone: a value of another length is its mathematics'.
    """
    arguments, options = refusal(case, inputs_of(case, device))
    ours = _error_of(lambda: subject.attention(*arguments, **options), device)
    if ours is not None:
        on_error(_named(ours))
    with sdpa_kernel(SDPBackend.MATH) if case.wrong == "length" else nullcontext():
        theirs = _error_of(lambda: scaled_dot_product_attention(*arguments, **options), device)
    said = f"{case.wrong}: ours {_named(ours)}; PyTorch {_named(theirs)}"
    if ours is None and theirs is None:
        return Outcome(Verdict.RIGHT)
    if theirs is None:
        return Outcome(Verdict.RAISED, said)
    if ours is None:
        return Outcome(Verdict.ACCEPTED, said)
    return Outcome(Verdict.REFUSED if isinstance(ours, type(theirs)) else Verdict.OTHER_ERROR, said)


def _error_of(call: Callable[[], object], device: torch.device) -> Exception | None:
    """What the call raises, unless it costs the CUDA context."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if is_lost(device):
            raise
        return error
    return None


def _named(error: Exception | None) -> str:
    return "computes it" if error is None else f"{type(error).__name__}: {error}"[:400]


def _judged(case: Case, inputs: Inputs, calls: Calls, results: list[tuple[Tensor, ...]]) -> Outcome:
    dtype = getattr(torch, case.kind.dtype)
    tensors = [view.tensor.to(dtype) for view in (inputs.query, inputs.key, inputs.value)]
    problem = calls.problem(*tensors)
    needed = case.needs if case.kind.gradients else ""
    grad = inputs.grad.to(dtype) if needed else None
    truth = truth_of(problem, grad)
    theirs, wider = _theirs(case, inputs, calls, problem, grad)
    told = _differences(case, inputs, results, theirs)
    poisoned = is_poisoned(case)
    names = ["out", *"qkv", *(name for name in "mas" if name in needed)]
    comparisons = []
    chosen = ["out", *needed]
    for result in results if not told else ():
        for name, ours in zip(chosen, result, strict=True):
            index = names.index(name)
            size = truth.score_size if index < 2 else truth.score_size.amax() if truth.score_size.numel() else 0.0
            comparisons.append(
                compare_errors(
                    name,
                    ours,
                    truth.tensors[index],
                    theirs[index],
                    truth.magnitudes[index],
                    size,
                    dtype,
                    poisoned=poisoned,
                    strict=bool(case.stray),
                    wider=wider,
                )
            )
    right = not told and all(each.is_right for each in comparisons)
    return Outcome(Verdict.RIGHT if right else Verdict.WRONG, told, (), tuple(comparisons))


def is_poisoned(case: Case) -> bool:
    """Whether an input is not finite."""
    return case.values in (Values.INF, Values.NAN) or bool(case.stray)


def _theirs(
    case: Case, inputs: Inputs, calls: Calls, problem: Problem, grad: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """PyTorch's output and gradients of query, key and value in the type, and the definition's output in float32 where
    PyTorch's is not finite. What hidden NaN leave of PyTorch's says nothing of its error."""
    views = inputs.query.tensor, inputs.key.tensor, inputs.value.tensor
    leaves = [view.detach().requires_grad_(grad is not None) for view in views]
    with keep_16_bits():
        if calls.theirs is not None:
            with enter_mode(case, leaves[0].device) if case.mode is Mode.AUTOCAST else torch.enable_grad():
                out = calls.theirs(*leaves)
        else:
            out = in_type(case, calls.problem(*leaves))
        theirs = [out.detach()]
        if grad is not None:
            theirs += torch.autograd.grad(out, leaves, grad.to(out.dtype), materialize_grads=True)
    if grad is not None and inputs.wanted:  # whose terms no one keeps in 16 bits
        wide = in_type(case, calls.problem(*leaves).wide(torch.float32))
        theirs += torch.autograd.grad(wide, inputs.wanted, grad.float(), materialize_grads=True)
    wider = None
    if not bool(out.isfinite().all()):
        if is_poisoned(case):
            wider = attention(problem.to(torch.float32)).detach().to(problem.query.dtype)
        elif problem.query.dtype is not torch.float32:
            wider = in_type(case, problem.to(torch.float32)).to(problem.query.dtype)
    return theirs, wider


@contextmanager
def keep_16_bits() -> Iterator[None]:
    """PyTorch's attention by the MATH backend converts 16-bit tensors to float32, unless it is allowed not to."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _differences(case: Case, inputs: Inputs, results: list[tuple[Tensor, ...]], theirs: list[Tensor]) -> str:
    """What is wrong with the results besides their values; empty where nothing is."""
    leaves = leaves_of(case, inputs)
    wanted = [leaf for leaf in (*leaves, *inputs.wanted) if leaf.requires_grad]
    for out, *gradients in results:
        expected = theirs[0]
        if (out.shape, out.dtype, out.device) != (expected.shape, expected.dtype, expected.device):
            return f"the output is {_kind_of(out)}, and PyTorch's {_kind_of(expected)}"
        if case.mode not in CAPTURED and out.requires_grad != bool(wanted):
            return f"requires_grad of the output is {out.requires_grad}"
        for leaf, gradient in zip(wanted, gradients, strict=True):
            if (leaf.shape, leaf.dtype) != (gradient.shape, gradient.dtype):
                return f"a gradient is {_kind_of(gradient)} of {_kind_of(leaf)}"
    return ""


def _kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"
