"""Memory of repeated calls is laid out and filled as that of the first ones."""

import pytest
import torch
from torch import Tensor

from blocktune.runtime.dispatch.launches import memory
from blocktune.runtime.dispatch.launches.memory import new_like

pytestmark = pytest.mark.triton_free

LIKE = {
    "transposed": torch.empty(2, 3, 4, 5, dtype=torch.bfloat16).transpose(1, 2),
    "float32": torch.empty(6, 7, dtype=torch.float32),
    "bytes": torch.empty(300, dtype=torch.uint8),
}
FILLS = (None, 0.0, float("-inf"))


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize(
    ("name", "fill"), [(name, fill) for name in LIKE for fill in FILLS[: 2 if name == "bytes" else None]]
)
def test_new_memory_is_like_a_tensor(
    name: str, fill: float | None, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = LIKE[name]
    if not is_short:
        monkeypatch.setattr(memory, "_makes", lambda device: None)
    new = new_like(like, fill)
    one, other = new(), new()
    for made in (one, other):
        assert type(made) is Tensor
        assert (made.shape, made.stride(), made.dtype, made.device) == (
            like.shape,
            like.stride(),
            like.dtype,
            like.device,
        )
        assert fill is None or bool((made == fill).all())
    assert one.data_ptr() != other.data_ptr()


def test_results_of_inference_mode_are_its_own() -> None:
    new = new_like(torch.empty(4))
    with torch.inference_mode():
        assert new().is_inference()
    assert not new().is_inference()


@pytest.mark.gpu
def test_memory_is_on_the_device_of_the_tensor() -> None:
    like = torch.empty(2, 3, 4, device="cuda", dtype=torch.float16).transpose(1, 2)
    made = new_like(like)()
    assert (made.device, made.stride(), made.dtype) == (like.device, like.stride(), like.dtype)
