"""flash-attention's module name for this package, in new processes: what a program and transformers then see."""

import subprocess
import sys

import pytest

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
torch.cuda.is_available = lambda: True  # all else that is asked is whose package this is
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True
from transformers.utils import is_flash_attn_2_available
assert is_flash_attn_2_available()
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
functions, _ = lazy_import_flash_attention("flash_attention_2")
import blocktune
assert functions[:3] == (blocktune.flash_attn_func, blocktune.flash_attn_varlen_func, functions[2])
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
    found = subprocess.run([sys.executable, "-P", "-c", start + code], capture_output=True, text=True)
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
    found = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert "before flash_attn is imported" in found.stdout


def test_nothing_is_aliased_on_import() -> None:
    code = "import sys, blocktune.flash_attn; assert 'flash_attn' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
