"""Random cases of all kernels: what they predict of shared memory bounds what the compiler allocates."""

import pytest

from blocktune.kernels.values.features import Features
from tests.kernels.base.test_shared_bytes import allocated_by
from tests.support.triton_modes import TRITON, compiled_here
from tools.checks.shared_draw import MOST_ABOVE_BYTES, DrawnCase, summary

pytestmark = [
    compiled_here,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(TRITON > (3, 6), reason="the bounds are those of Triton 3.6"),
]
SAMPLE = range(0, 3000, 10)
"""Of the 3,000 cases that `tools.checks.shared_draw` draws."""
NARROW = 11780, 30068, 30271, 30770
"""Later cases of 16 columns, whose threads copy too little ahead, or whose halves `tcgen05` does not multiply."""


@pytest.mark.few(24)
@pytest.mark.parametrize("number", [*SAMPLE, *NARROW])
def test_predicted_shared_memory_is_the_compiler_s_or_a_bound_at_most_1_kib_above(number: int) -> None:
    case = DrawnCase.draw(number)
    allocated = max(allocated_by((spec,), case.cc)[0] for spec in case.specs)
    least, most = case.bounds_bytes
    assert least <= allocated <= most
    assert most - allocated <= MOST_ABOVE_BYTES


def test_a_number_names_one_case_whose_features_its_kernel_knows() -> None:
    cases = [DrawnCase.draw(number) for number in range(60)]
    assert cases == [DrawnCase.draw(number) for number in range(60)]
    assert all(case.shape.features.names <= case.kernel.features for case in cases)
    assert any(case.shape.features != Features() for case in cases)


def test_the_summary_counts_bounds_by_how_near_they_are() -> None:
    case = DrawnCase.draw(3)
    row = {"config": case.config.to_json(), "shape": case.shape.to_json(), "cc": case.cc}
    least, most = case.bounds_bytes
    assert "least above" in summary([row | {"allocated": [(least - 1, 0)]}])
    assert "most below" in summary([row | {"allocated": [(most + 1, 0)]}])
    assert "did not compile" in summary([row | {"failed": "an error"}])
