import pytest, torch
from tests.kernels.hopper.fp8 import test_flash_fwd_fp8_source as src
@pytest.mark.triton_free
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("causal", src.Causal)
def test_t(t, causal, monkeypatch):
    monkeypatch.setattr(src.flash_fwd_fp8, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    src.check(src.shape_of(130, 300, num_heads=1, num_heads_kv=1, causal=causal), turn_values=t)
