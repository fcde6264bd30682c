"""What the kernels of examples/ compute, wherever kernels run. A GPU multiplies float32 as TF32."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.autotuned.choices import CallPlace
from blocktune.runtime.autotuned.config import LaunchProblem
from examples.autotuned_attention import attention
from examples.autotuned_grouped_matmul import expert_config_file, grouped_matmul, grouped_matmul_kernel
from tests.support.triton_modes import DEVICE, runs

# Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
pytestmark = [
    pytest.mark.interpreted,
    runs,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 100, 16, device=DEVICE) for _ in range(3))
    expected = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=is_causal)[0]
    torch.testing.assert_close(attention(q, k, v, is_causal), expected, rtol=1e-2, atol=1e-2)


def test_experts_have_rows_of_any_number() -> None:
    a, b = torch.randn(50, 32, device=DEVICE), torch.randn(4, 32, 80, device=DEVICE)
    ends = torch.tensor([17, 17, 49, 50], dtype=torch.int32, device=DEVICE)
    found, begin = grouped_matmul(a, b, ends), 0
    for expert, end in enumerate(ends.tolist()):
        torch.testing.assert_close(found[begin:end], a[begin:end] @ b[expert], rtol=1e-2, atol=1e-2)
        begin = end


def test_winners_are_written_as_servers_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = triton.Config({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128}, num_warps=8, num_stages=4)
    explanation = SimpleNamespace(launched=config)
    places = (CallPlace(0, LaunchProblem.of({"tokens": tokens}), None) for tokens in (1024, 64))
    served = dict.fromkeys(places, SimpleNamespace(explanation=explanation))
    monkeypatch.setattr(grouped_matmul_kernel.kernel.table, "served", served)
    path = expert_config_file(tmp_path, "NVIDIA H200")
    assert path.name == "E=8,N=2048,device_name=NVIDIA_H200.json"
    each = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "num_warps": 8, "num_stages": 4}
    assert list(json.loads(path.read_text()).items()) == [("64", each), ("1024", each)]
