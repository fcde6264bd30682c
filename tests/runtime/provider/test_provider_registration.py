"""The provider's name in PyTorch's registry: known from `import torch` on, active when asked, gone when restored."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_registry
from torch.nn.functional import scaled_dot_product_attention

from blocktune.integrations import replace_sdpa_flash, restore_sdpa_flash
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.provider import PROVIDER, registration
from blocktune.runtime.provider.registration import ATEN, OPS, register_provider, replace_ops
from blocktune.runtime.provider.replacement import LateServer, ReplacedOp
from tests.support.fakes.dispatch_fakes import ListSource, pretend_h200
from tests.support.fakes.provider_fakes import Standins, provided

pytestmark = pytest.mark.triton_free

without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA the ops have kernels of their own")


def replaced(key: str = "CUDA") -> set[str]:
    """The ops with a kernel for this key, of which PyTorch without CUDA has none."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {op.name for op in OPS if op.is_defined and has(op.label, key)}


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    restore_sdpa_flash()


@without_cuda
@pytest.mark.usefixtures("_restored")
def test_all_ops_are_replaced_and_restored_twice() -> None:
    import torch.nn.attention.varlen  # noqa: F401 (the ops of torch_attn come with it)

    everything = {op.name for op in OPS}
    register_provider()
    for _ in range(2):
        assert replaced() == set()
        torch_registry.activate_flash_attention_impl(PROVIDER)
        assert replaced() == everything
        torch_registry.activate_flash_attention_impl(PROVIDER)
        assert replaced() == everything
        assert torch_registry.current_flash_attention_impl() == PROVIDER
        torch_registry.restore_flash_attention_impl()
        assert torch_registry.current_flash_attention_impl() is None
    replace_sdpa_flash()
    assert replaced() == everything
    restore_sdpa_flash()
    assert replaced() == set()


def test_restoring_leaves_others_alone() -> None:
    class Other:
        removed = False

        def remove(self) -> None:
            self.removed = True

    other = Other()
    torch_registry.register_flash_attention_impl("somebody's", register_fn=lambda: other)
    torch_registry.activate_flash_attention_impl("somebody's")
    restore_sdpa_flash()
    assert torch_registry.current_flash_attention_impl() == "somebody's"
    torch_registry.restore_flash_attention_impl()
    assert other.removed


IMPORT = """
import sys
import torch
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls
assert not {"triton", "torch._dynamo", "blocktune.runtime.dispatch.dispatcher"} & set(sys.modules)
assert "blocktune" in list_flash_attention_impls()
print(current_flash_attention_impl())
"""


def said(code: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a new process with these variables prints."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert found.stderr == ""
    return found.stdout.strip()


@pytest.mark.parametrize(("value", "active"), [("", "None"), ("1", "blocktune")])
def test_the_environment_activates(monkeypatch: pytest.MonkeyPatch, value: str, active: str) -> None:
    """And `import torch` loads nothing that takes long, active or not."""
    assert said(IMPORT, {"BLOCKTUNE_SDPA": value}, monkeypatch) == active


def changed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let ops have functions that fit another schema."""

    def other(server: Any, query: Tensor, renamed: Tensor) -> None: ...

    ops = (ReplacedOp(op.namespace, op.name, other, op.results) if op.name in names else op for op in OPS)
    monkeypatch.setattr(registration, "OPS", tuple(ops))


@without_cuda
def test_an_unknown_schema_leaves_the_op_alone_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"_scaled_dot_product_cudnn_attention", "_flash_attention_forward"}
    changed(monkeypatch, *names)
    with caplog.at_level(logging.WARNING, "blocktune"):
        handle = replace_ops()
    (warning,) = caplog.messages
    assert all(f"aten::{name}(" in warning for name in names)
    assert "Update blocktune" in warning
    assert not replaced() & names
    assert "_scaled_dot_product_flash_attention" in replaced()
    handle.remove()
    caplog.clear()


@pytest.mark.parametrize(
    ("arguments", "results", "fits"),
    [
        ("Tensor query, Tensor key", "Tensor", True),
        ("Tensor query, Tensor key, *, float? scale=None", "Tensor", True),
        ("Tensor query", "Tensor", True),
        ("Tensor key, Tensor query", "Tensor", False),
        ("Tensor query, Tensor key, Tensor sinks", "Tensor", False),
        ("Tensor query, Tensor key, *, float? softcap=None", "Tensor", False),
        ("Tensor query, Tensor key", "(Tensor, Tensor)", False),
        ("Tensor query, Tensor key", "int", False),
    ],
)
def test_schemas_are_compared(arguments: str, results: str, fits: bool) -> None:
    def serve(server: Any, query: Tensor, key: Tensor, *, scale: float | None = None) -> None: ...

    op = ReplacedOp(ATEN, "op", serve, "Tensor")
    assert op.fits(torch._C.parse_schema(f"aten::op({arguments}) -> {results}")) == fits


QKV = "Tensor query, Tensor key, Tensor value"
FORWARD_OF_211 = (
    f"aten::_flash_attention_forward({QKV}, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float "
    "dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, SymInt? "
    "window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None) -> (Tensor output, Tensor "
    "softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
)
PACKED = f"{QKV}, Tensor cu_seq_q, Tensor cu_seq_k, SymInt max_q, SymInt max_k"
OPTIONS = "bool is_causal=False, float? scale=None, SymInt[]? window_size=None"
MORE = "bool enable_gqa=False, Tensor? seqused_k=None, Tensor? block_table=None, SymInt? num_splits=None"
VARLEN_OF_211 = f"torch_attn::_varlen_attn({PACKED}, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
VARLEN_OF_215 = f"torch_attn::_varlen_attn({PACKED}, {OPTIONS}, {MORE}, SymInt backend=1) -> (Tensor, Tensor, Tensor)"
OUT_OF_215 = f"torch_attn::_varlen_attn_out(Tensor(a0!) out, {PACKED}, {OPTIONS}, {MORE}, SymInt backend=1) -> Tensor"


@pytest.mark.parametrize("text", [FORWARD_OF_211, VARLEN_OF_211, VARLEN_OF_215, OUT_OF_215])
def test_schemas_of_other_pytorchs_are_known(text: str) -> None:
    """Of torch 2.11 to 2.15 the others are those of the torch that runs this test or of these."""
    schema = torch._C.parse_schema(text)
    (op,) = (op for op in OPS if op.label == schema.name)
    assert op.fits(schema)


VARLEN_LATE = """
import logging
import torch
from torch.nn.attention import activate_flash_attention_impl
from blocktune.runtime.provider import registration
from blocktune.runtime.provider.replacement import ReplacedOp
from dataclasses import replace

def serve(server, query, other):
    raise AssertionError("an unknown op was served")

if {drift}:
    ops = (replace(op, serve=serve) if op.name == "_varlen_attn" else op for op in registration.OPS)
    registration.OPS = tuple(ops)
handle = registration.replace_ops("CPU")
with torch.library._scoped_library("aten", "IMPL") as library:
    def theirs(query, *others, **options):
        return query + 1, query.new_zeros(2, 4), query.new_zeros(2), query.new_zeros(()), query.new_zeros(0)
    handle.remove()
    library.impl("_flash_attention_forward", theirs, "CPU")
    handle = registration.replace_ops("CPU")
    from torch.nn.attention.varlen import varlen_attn
    query, begins = torch.zeros(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    assert varlen_attn(query, query, query, begins, begins, 4, 4).eq(1).all()
    assert varlen_attn(query, query, query, begins, begins, 4, 4).eq(1).all()
"""


@pytest.mark.parametrize("drift", [False, True])
def test_ops_that_are_defined_after_the_activation(drift: bool) -> None:
    """The CPU has no kernel of ours, so PyTorch computes both calls."""
    code = VARLEN_LATE.format(drift=drift)
    found = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert found.stderr.count("_varlen_attn(Tensor query") == drift


def test_threads_share_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_h200(monkeypatch)

    def attend(seqlen: int) -> None:
        tensors = [torch.randn(1, 2, seqlen, 16) for _ in range(3)]
        for _ in range(3):
            out = torch.ops.aten._scaled_dot_product_cudnn_attention(*tensors, None, True, 0.0, True)[0]
            torch.testing.assert_close(out, scaled_dot_product_attention(*tensors, is_causal=True))

    with provided(Standins()), ThreadPoolExecutor(4) as pool:
        list(pool.map(attend, [16, 32, 48, 64] * 3))


def test_threads_call_between_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not during one: PyTorch frees a kernel that is taken away, also while another thread is about to call it."""
    pretend_h200(monkeypatch)
    dispatcher = Dispatcher(ListSource())

    def attend(number: int) -> bool:
        tensors = [torch.randn(1, 2, 16, 16) for _ in range(3)]
        out = torch.ops.aten._scaled_dot_product_flash_attention(*tensors)[0]
        is_theirs = bool((out == 7.0).all())
        assert is_theirs or torch.allclose(out, scaled_dot_product_attention(*tensors), atol=1e-5)
        return is_theirs

    with torch.library._scoped_library(ATEN, "IMPL") as library, ThreadPoolExecutor(2) as pool:
        name = "_scaled_dot_product_flash_attention"
        library.impl(name, Standins().kernel(name), "CPU")
        for _ in range(10):
            handle = replace_ops("CPU", late=LateServer(dispatcher))
            assert not any(pool.map(attend, range(4)))
            handle.remove()
            assert all(pool.map(attend, range(4)))
