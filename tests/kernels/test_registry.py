"""The registry: kernels from elsewhere join it for a while, for good, or by an environment variable."""

import itertools
import os
import subprocess

import pytest
import torch

from blocktune.kernels import registry
from blocktune.kernels.files.variables import KERNEL_CLASSES
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.registry import KERNELS, competing, default_kernel, get_kernel, kernels_for, register
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UnknownKernelError, UsageError
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Direction
from tests.support.toy_kernel import ToyForward
from tests.support.triton_modes import DEVICE, runs
from tools import python

TOY = "tests.support.toy_kernel:ToyForward"
LAST_KERNEL = "from blocktune.kernels.registry import KERNELS; print(list(KERNELS)[-1])"


def test_a_kernel_is_registered_while_its_context_lasts() -> None:
    with register(ToyForward()):
        assert competing()[-1] is get_kernel("toy")
        assert os.environ[KERNEL_CLASSES.name] == TOY
    with pytest.raises(UnknownKernelError):
        get_kernel("toy")
    assert KERNEL_CLASSES.name not in os.environ


def test_a_name_is_given_once() -> None:
    with register(ToyForward()), pytest.raises(UsageError, match="'toy' is taken"):
        register(ToyForward())
    with pytest.raises(UsageError, match="'flash_fwd' is taken"):
        register(FlashForward())


def test_a_class_that_no_other_process_can_import_is_refused() -> None:
    class Local(ToyForward):
        name = "local"

    with pytest.raises(UsageError, match=r"Move it to a module"):
        register(Local())
    assert "local" not in KERNELS


def last_kernel(code: str, **environment: str) -> str:
    """The last kernel of a process that runs this code first."""
    done = subprocess.run(
        python(f"{code}\n{LAST_KERNEL}"), capture_output=True, text=True, env=os.environ | environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_other_processes_know_it_by_the_environment() -> None:
    assert last_kernel("", **{KERNEL_CLASSES.name: f" {TOY},"}) == "toy"


def test_a_module_that_registers_its_kernel_may_be_named_too(tmp_path) -> None:
    """As in the processes that a program starts whose module registers a kernel when it is imported."""
    text = "from tests.support.toy_kernel import ToyForward\nfrom blocktune.kernels.registry import register\n"
    (tmp_path / "mine.py").write_text(f"{text}class Mine(ToyForward):\n    name = 'mine'\nregister(Mine())\n")
    assert (
        last_kernel(f"import sys; sys.path.append({str(tmp_path)!r})", **{KERNEL_CLASSES.name: "mine:Mine"}) == "mine"
    )


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere:Kernel", "No module named 'nowhere'"),
        ("tests.support.toy_kernel:Missing", "has no attribute 'Missing'"),
        ("tests.support.toy_kernel", "separated by commas"),
        ("builtins:dict", "subclasses of AttentionKernel"),
    ],
)
def test_what_the_environment_names_wrongly_is_said(path: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        registry._load(path)


@runs
@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_the_toy_computes_attention() -> None:
    shape = AttentionShape(
        batch=2, num_heads=4, num_heads_kv=2, seqlen_q=80, seqlen_k=75, head_dim=32, head_dim_v=32, dtype="float16"
    )
    kernel, config = ToyForward(), KernelConfig("toy", 64, 32, 4, 2)
    assert kernel.violations(config, shape, limits_for((9, 0))) == ()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, rows, 32, device=DEVICE).half() for heads, rows in ((4, 80), (2, 75), (2, 75)))
    out, lse = torch.full_like(q, float("nan")), torch.full((2, 4, 80), float("nan"), device=DEVICE)
    kernel.bind(config, shape)(q, k, v, out, lse, 0.25)
    wanted, wanted_lse = attention_reference(q, k, v, scale=0.25)
    torch.testing.assert_close(out.double(), wanted.double(), rtol=0, atol=2e-3)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)])
def test_the_default_kernel_is_the_first_that_competes(cc: tuple[int, int], direction: Direction) -> None:
    limits, first = limits_for(cc), []
    for seqlen_q, head_dim, features in itertools.product((1, 512, 8192), (64, 128, 256), ("", "softcap", "alibi")):
        shape = AttentionShape(
            batch=1, num_heads=8, seqlen_q=seqlen_q, seqlen_k=max(seqlen_q, 512), head_dim=head_dim,
            direction=direction, features=features,
        )  # fmt: skip
        able = kernels_for(shape, limits)
        assert default_kernel(shape, limits) == (able[0] if able else None)
        first += able[:1]
    assert first
