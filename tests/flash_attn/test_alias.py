"""flash-attention's module name for this package, in new processes: what a program and transformers then see."""

import sys

import pytest

from tests.support.suite import warm_python

pytestmark = pytest.mark.triton_free

README = """
import torch
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
import flash_attn.cute

qkv = torch.randn(2, 8, 3, 4, 16)
q, k, v = qkv.unbind(2)
out = flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=True, window_size=(-1, -1),
                      alibi_slopes=None, deterministic=False)
assert torch.equal(out, flash_attn_qkvpacked_func(qkv, causal=True))
mask = torch.ones(2, 8).tril(diagonal=5)
tokens, places, begins, longest, used = unpad_input(qkv, mask)
packed = flash_attn_varlen_func(*tokens.unbind(1), begins, begins, longest, longest, causal=True)
assert pad_input(packed, places, 2, 8).shape == (2, 8, 4, 16)
cache = torch.zeros(2, 2, 16, 4, 16)
lengths = torch.tensor([3, 5], dtype=torch.int32)
flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, causal=True)
assert cache[0, 0, 3:11].equal(k[0])
"""

IN_TRANSFORMERS = """
import torch
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True  # all else that is asked is whose package this is
from transformers import LlamaConfig, LlamaForCausalLM, modeling_flash_attention_utils as used
used.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["supported_devices"] = ((lambda: True, "cpu"),)
from transformers.utils import is_flash_attn_2_available

assert is_flash_attn_2_available()
torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.1))
tokens, mask = torch.randint(0, 96, (2, 12)), torch.ones(2, 12, dtype=torch.long)
mask[0, :5] = 0
labels = tokens.clone()
labels[0, :6] = -100  # what padding would predict
results = []
for name in ("eager", "flash_attention_2"):
    model.set_attn_implementation(name)
    out = model(tokens, attention_mask=mask, labels=labels)
    (gradient,) = torch.autograd.grad(out.loss, [model.model.layers[0].self_attn.q_proj.weight])
    results.append((out.logits[mask.bool()], gradient))
for one, other in zip(*results):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
import blocktune
assert used._flash_varlen_fn is blocktune.flash_attn_varlen_func
"""

METADATA = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("flash_attn") is not None
assert importlib.metadata.version("flash-attn").endswith("+blocktune")
assert importlib.metadata.version("flash_attn") == __import__("flash_attn").__version__
assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
assert "not installed" in importlib.metadata.metadata("flash-attn")["Summary"]
assert importlib.metadata.version("blocktune")
try:
    importlib.metadata.version("flash-attn-3")
except importlib.metadata.PackageNotFoundError:
    print("none")
alias()
"""


def run(code: str) -> str:
    start = "from blocktune.flash_attn import alias\nalias()\n"
    found = warm_python.run([sys.executable, "-P", "-c", start + code])
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_the_readmes_calls_run_unchanged() -> None:
    run(README)


def test_metadata_says_whose_functions_these_are() -> None:
    assert run(METADATA) == "none"


def test_transformers_takes_it_for_flash_attention_2() -> None:
    pytest.importorskip("transformers")
    run(IN_TRANSFORMERS)


def test_a_real_one_that_is_imported_is_refused() -> None:
    code = (
        "import sys, types\n"
        "sys.modules['flash_attn'] = types.ModuleType('flash_attn')\n"
        "from blocktune.flash_attn import alias\n"
        "try:\n    alias()\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    found = warm_python.run([sys.executable, "-P", "-c", code], check=True)
    assert "before flash_attn is imported" in found.stdout


def test_nothing_is_aliased_on_import() -> None:
    code = "import sys, blocktune.flash_attn; assert 'flash_attn' not in sys.modules"
    warm_python.run([sys.executable, "-P", "-c", code], check=True)
