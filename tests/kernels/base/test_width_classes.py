"""Every kernel at every pair of head dimensions that its rules admit: compiled for GPUs that are not here, and legal.

The rest of the product, hours of compiling, is `make width-test`. All of it is for the pinned Triton. For sm_100, 3.9
copies uniform registers that nothing has written (flash_fwd_transposed 64x64 at 128 columns, flash_fwd_tma 256x32 at
192), and whether something reads the copies is not known yet.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from blocktune.kernels.base.kernel import MAX_HEAD_DIM, AttentionKernel, CompileSpec
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.shape import FP8
from blocktune.tuner.compile.compiler import compiled_code
from tests.support.attention.width_classes import (
    ARCHITECTURES,
    DIMS,
    Case,
    candidate_cases,
    covering_cases,
    every_case,
    narrow_cases,
    shape_for,
)
from tests.support.compiles.measures import launched_specs
from tests.support.compiles.remembered import remembered
from tests.support.machine_code.sass import disassembled
from tests.support.machine_code.shared_memory_checks import illegal_tiles
from tests.support.machine_code.wgmma_descriptors import unwritten_reads, wrong_descriptors
from tests.support.triton_modes import compiled_here

FULL = os.environ.get("BLOCKTUNE_WIDTHS") == "full"
NARROW = narrow_cases()
REST = tuple(dict.fromkeys((*every_case(), *candidate_cases(6)))) if FULL else ()
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def _shared_cache(monkeypatch: pytest.MonkeyPatch, code_folder: Path) -> None:
    """Passes over rows, splits and values are the same for several cases."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(code_folder))


def problems(case: Case) -> Iterator[str]:
    """What is wrong with the code of a case."""
    limits, kernel = limits_for(case.cc), case.kernel
    yield from kernel.violations(case.config, case.shape, limits)
    yield from _problems_of_code(launched_specs(kernel, case.config, case.shape), case.cc)


@remembered
def _problems_of_code(specs: Sequence[CompileSpec], cc: tuple[int, int]) -> list[str]:
    found: list[str] = []
    for spec in specs:
        compiled = compiled_code(spec, cc)
        code = disassembled(compiled.asm["cubin"])
        found += [*illegal_tiles(compiled, limits_for(cc)), *unwritten_reads(code)]
        found += wrong_descriptors(code, compiled.asm["ptx"]) if cc == HOPPER else ()
    return found


@compiled_here
@pytest.mark.few(1)
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_values_narrower_than_queries_compile_to_legal_code(case: Case) -> None:
    assert list(problems(case)) == []


@cache
def chosen_cases() -> tuple[Case, ...]:
    """Return default configs that cover all pairs of choices, and some configs that a search might try.

    To find them takes seconds, which a collection of tests does not spend.
    """
    return tuple(dict.fromkeys((*covering_cases(), *candidate_cases(1, every=12))))


@compiled_here
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KERNELS)
def test_the_widths_of_every_kernel_compile_to_legal_code(name: str) -> None:
    cases = [case for case in chosen_cases() if case.config.kernel == name]
    assert cases
    assert {str(case): found for case in cases if (found := list(problems(case)))} == {}


@compiled_here
@pytest.mark.exhaustive
@pytest.mark.skipif(not FULL, reason="BLOCKTUNE_WIDTHS=full compiles every width")
@pytest.mark.parametrize("case", REST, ids=str)
def test_every_width_compiles_to_legal_code(case: Case) -> None:
    assert list(problems(case)) == []


@pytest.mark.triton_free
@pytest.mark.parametrize("name", KERNELS)
def test_every_pair_is_refused_with_a_reason_or_has_a_default_that_breaks_no_rule(name: str) -> None:
    kernel = get_kernel(name)
    admitted = 0
    for cc, dtype in itertools.product(ARCHITECTURES, kernel.dtypes):
        for dims in itertools.product((8, *sorted(DIMS), 100, MAX_HEAD_DIM + 8), repeat=2):
            shape = shape_for(kernel, cc, dims, dtype)
            if shape is None:
                continue
            admitted += 1
            config = kernel.default_config(shape, limits_for(cc))
            assert kernel.violations(config, shape, limits_for(cc)) == (), (shape.label, config.label, cc)
    assert admitted > 0


@pytest.mark.triton_free
def test_the_covering_cases_meet_every_kernel_on_every_architecture_that_it_runs_on() -> None:
    met = {(case.kernel.name, case.cc) for case in (*NARROW, *covering_cases())}
    assert met == {(case.kernel.name, case.cc) for case in every_case((64, 128))}
    widths = {(case.kernel.name, case.shape.head_dim) for case in (*NARROW, *covering_cases())}
    assert widths >= {(case.kernel.name, case.shape.head_dim) for case in every_case((16, 64, 256))}


def reason(kernel: AttentionKernel, head_dim: int, head_dim_v: int) -> str:
    dtype = FP8 if FP8 in kernel.dtypes else "bfloat16"
    shape = shape_for(kernel, HOPPER, (64, 64), dtype) or shape_for(kernel, HOPPER, (128, 128), dtype)
    assert shape is not None
    return kernel.unsupported(replace(shape, head_dim=head_dim, head_dim_v=head_dim_v), limits_for(HOPPER)) or ""


@pytest.mark.triton_free
@pytest.mark.parametrize("name", KERNELS)
def test_a_refused_pair_has_a_reason_that_names_the_dimension(name: str) -> None:
    for head_dim, head_dim_v in ((8, 64), (64, 8), (264, 64), (64, 264)):
        said = reason(get_kernel(name), head_dim, head_dim_v)
        assert name in said
        assert ("head_dim=" if head_dim != 64 else "head_dim_v=") in said
