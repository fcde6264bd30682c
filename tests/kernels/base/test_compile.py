"""The portable kernels compiled for GPUs that are not here: tensor cores, no spills, the overlap of schedules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from blocktune.kernels.base.flash_kernel import AHEAD, AHEAD_FIXED, IN_ORDER, FlashKernel
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS, get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import compiled_code
from tests.support.compiles.measures import compile_resources
from tests.support.compiles.remembered import remembered
from tests.support.machine_code.kernels import loops, mnemonic
from tests.support.machine_code.sass import listed
from tests.support.triton_modes import TRITON, compiled_here

pytestmark = compiled_here
PORTABLE = [name for name, kernel in KERNELS.items() if isinstance(kernel, FlashKernel)]
HOPPER, BLACKWELL = (9, 0), (10, 0)
TENSOR_CORES = {(8, 0): "mma", HOPPER: "wgmma", BLACKWELL: "tcgen05", (12, 0): "mma"}


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def shape(head_dim: int = 64) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 8, "seqlen_q": 4096, "seqlen_k": 4096}
    return AttentionShape(**sizes, head_dim=head_dim, head_dim_v=head_dim)


def default(kernel: str, cc: tuple[int, int], head_dim: int = 64, schedule: int | None = None) -> KernelConfig:
    """The kernel's default config, with another schedule if one is given."""
    config = get_kernel(kernel).default_config(shape(head_dim), limits_for(cc))
    return config if schedule is None else replace(config, extra=(("schedule", schedule),))


def supported() -> list[tuple[str, tuple[int, int]]]:
    return [
        (kernel.name, cc)
        for cc in TENSOR_CORES
        for kernel in kernels_for(shape(), limits_for(cc))
        if kernel.name in PORTABLE
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("kernel", "cc"), supported())
def test_default_config_compiles_without_spills(kernel: str, cc: tuple[int, int], head_dim: int) -> None:
    resources = compile_resources(get_kernel(kernel), default(kernel, cc, head_dim), shape(head_dim), cc)
    assert resources.tensor_cores == TENSOR_CORES[cc]
    assert resources.spill_bytes == 0
    assert resources.shared_bytes <= limits_for(cc).shared_per_block_optin_bytes


def other_schedules() -> Iterator[tuple[str, tuple[int, int], int]]:
    for kernel, cc in supported():
        own = default(kernel, cc).parameters["schedule"]
        yield from ((kernel, cc, schedule) for schedule in (IN_ORDER, AHEAD, AHEAD_FIXED) if schedule != own)


@pytest.mark.few(2)
@pytest.mark.parametrize(("kernel", "cc", "schedule"), list(other_schedules()))
def test_every_other_schedule_compiles(kernel: str, cc: tuple[int, int], schedule: int) -> None:
    config = default(kernel, cc, schedule=schedule)
    if TRITON == (3, 6) and cc == BLACKWELL and schedule == AHEAD_FIXED:
        # Triton 3.6 fails in its pass over layouts of tensor memory, where inline assembly takes the accumulator.
        with pytest.raises(RuntimeError, match="PassManager::run failed"):
            compile_resources(get_kernel(kernel), config, shape(), cc)
    else:
        resources = compile_resources(get_kernel(kernel), config, shape(), cc)
        assert resources.tensor_cores == TENSOR_CORES[cc]


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_default_config_leaves_out_what_triton_cannot_compile(kernel: str, head_dim: int) -> None:
    assert default(kernel, BLACKWELL, head_dim).parameters["schedule"] == IN_ORDER


@dataclass(frozen=True)
class Loop:
    """What the first loop with matrix products issues: exponentials, those of them that are hidden behind products
    (`hidden_exponentials`), and stores to shared memory."""

    exponentials: int
    hidden: int
    stores: int


def main_loop(kernel: str, config: KernelConfig) -> Loop:
    """What a kernel's main loop issues on compute capability 9.0."""
    return Loop(*_loop_counts((get_kernel(kernel).compile_spec(config, shape()),), HOPPER))


@remembered
def _loop_counts(specs: Sequence[CompileSpec], cc: tuple[int, int]) -> tuple[int, int, int]:
    loop = _products_loop(compiled_code(specs[0], cc).asm["cubin"])
    return loop.count("MUFU.EX2"), hidden_exponentials(loop), sum(name.startswith(("STS", "STSM")) for name in loop)


def _products_loop(cubin: bytes) -> list[str]:
    """The instructions, without operands, of the first loop that holds matrix products."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        for loop in loops(listed(Path(file.name))):
            names = [mnemonic(text) for _, text in loop]
            if any(name.startswith("HGMMA") for name in names):
                return names
    raise AssertionError("The code has no loop with matrix products.")


def hidden_exponentials(loop: list[str]) -> int:
    """Exponentials that are issued while matrix products are in flight: behind one, and ahead of the wait for it."""
    hidden, in_flight = 0, False
    for name in loop:
        if name.startswith("HGMMA"):
            in_flight = True
        elif name.startswith("WARPGROUP.DEPBAR"):
            in_flight = False
        elif name == "MUFU.EX2":
            hidden += in_flight
    return hidden


@pytest.mark.few(2)
@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("schedule", [AHEAD, AHEAD_FIXED])
def test_running_ahead_hides_exponentials_behind_products(kernel: str, schedule: int) -> None:
    loop = main_loop(kernel, default(kernel, HOPPER, schedule=schedule))
    assert loop.hidden > 0
    assert loop.stores == 0  # the probabilities stay in registers


def test_default_config_hides_most_exponentials() -> None:
    loop = main_loop("flash_fwd_tma", default("flash_fwd_tma", HOPPER))
    assert loop.exponentials == 64 * 64 // 128  # a thread of four warps has 32 scores of the tile
    assert loop.hidden >= 24


@pytest.mark.parametrize("kernel", PORTABLE)
def test_in_order_hides_none(kernel: str) -> None:
    """What running ahead is for; and the proof that the test above can tell the difference."""
    loop = main_loop(kernel, default(kernel, HOPPER, schedule=IN_ORDER))
    assert loop.exponentials > 0
    assert loop.hidden == 0


@pytest.mark.parametrize("kernel", PORTABLE)
def test_warps_that_share_rows_exchange_probabilities(kernel: str) -> None:
    """64 rows are four warps' worth: with eight the probabilities do go through shared memory (`shared_bytes`)."""
    config = KernelConfig(kernel, 64, 64, 8, 2, (("schedule", AHEAD_FIXED),))
    assert main_loop(kernel, config).stores > 0
