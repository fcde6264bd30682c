"""Special values on a GPU: infinities, huge scores, masks of another type, negative scales.

Every case runs in a process that the cases share and that is started again when one has broken it. With `-s` or
`-rA` each prints its errors, PyTorch's, and which kernel served it.
"""

import json
import subprocess
from collections.abc import Iterator
from math import isfinite

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.dispatch.dispatcher import attention
from tools import program
from tools.checks.special_values import CASES, Report

pytestmark = pytest.mark.gpu

SECONDS = 280
"""A case compiles two or three kernels at most."""


class Worker:
    """The process that computes cases."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def examine(self, name: str) -> Report:
        """The report of a case; of one that ends the process, too."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = program("checks.special_values")
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            return Report(name, problem=f"the process ended with {process.wait()}")
        report = Report(**json.loads(line))
        if report.ends_process:
            process.wait()
        return report

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    process = Worker()
    yield process
    process.close()


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", CASES)
def test_special_values_are_as_right_as_pytorchs(worker: Worker, name: str) -> None:
    report = worker.examine(name)
    print(f"{name}: served by {report.served}; PyTorch: {report.pytorch_problem or 'runs'}")
    assert not report.problem, report.problem
    bounds = {output: report.bound(output, CASES[name].rounding(output)) for output in report.ours}
    for output, error in report.ours.items():
        chosen, own = report.pytorch.get(output), report.mathematics[output]
        finite = "not run" if chosen is None else f"{chosen:.3g}" if isfinite(chosen) else "not finite"
        print(
            f"    {output}: error {error:.3g}, PyTorch {finite}, its mathematics {own:.3g}, "
            f"largest {report.sizes[output]:.3g}, bound {bounds[output]:.3g}"
        )
    assert {output: error for output, error in report.ours.items() if not error <= bounds[output]} == {}


@pytest.mark.parametrize("masked", [False, True])
def test_queries_without_elements(masked: bool) -> None:
    query = torch.randn(1, 2, 4, 0, device="cuda", requires_grad=True)
    mask = torch.zeros(4, 4, device="cuda") if masked else None
    out = attention(query, query, query, mask)
    assert out.shape == scaled_dot_product_attention(query, query, query, mask).shape
    assert torch.autograd.grad(out.sum(), query)[0].shape == query.shape
