"""Masks whose rows are not aligned are copied, element for element, by one launch; others are read as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels.base.feature_arguments import mask_bytes
from blocktune.kernels.portable.forward.aligned_masks import MaskRows
from tests.support.triton_modes import DEVICE, runs

pytestmark = pytest.mark.interpreted

Make = Callable[..., Tensor]
DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)


def drawn(*sizes: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.randn(sizes, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return numbers > 0 if dtype is torch.bool else numbers.to(dtype)


COPIED: dict[str, Make] = {
    "every head": lambda **own: drawn(2, 3, 20, 37, **own),
    "one for all": lambda **own: drawn(20, 37, **own).expand(2, 3, 20, 37),
    "keys of an entry": lambda **own: drawn(2, 1, 1, 37, **own).expand(2, 3, 20, 37),
    "heads": lambda **own: drawn(1, 3, 20, 300, **own).expand(2, 3, 20, 300),
    "turned": lambda **own: drawn(2, 3, 48, 32, **own).mT,
    "part of aligned rows": lambda **own: drawn(2, 3, 20, 64, **own)[..., 1:33],
    "every second key": lambda **own: drawn(2, 3, 20, 64, **own)[..., ::2],
}
AS_THEY_ARE: dict[str, Make] = {
    "every head": lambda **own: drawn(2, 3, 20, 48, **own),
    "one for all": lambda **own: drawn(20, 48, **own).expand(2, 3, 20, 48),
    "keys alone": lambda **own: drawn(37, **own).expand(2, 3, 20, 37),
    "begin of aligned rows": lambda **own: drawn(2, 3, 20, 64, **own)[..., :37],
    "one number": lambda **own: drawn(1, **own).expand(2, 3, 20, 37),
    "one number for a query": lambda **own: drawn(2, 1, 20, 1, **own).expand(2, 3, 20, 37),
}


def read(rows: MaskRows, mask: Tensor) -> Tensor:
    """What the kernels read, element by element."""
    copied = torch.zeros(rows.elements, dtype=rows.dtype, device=DEVICE) if rows.elements else None
    found: Any = rows.read(mask_bytes(mask), copied)
    return found.as_strided(mask.shape, rows.strides, found.storage_offset())


@runs
@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", COPIED)
def test_copies_hold_the_same_numbers_in_aligned_rows(layout: str, dtype: torch.dtype) -> None:
    mask = COPIED[layout](dtype=dtype)
    rows = MaskRows.of(mask, pins=False)
    assert torch.equal(read(rows, mask), mask_bytes(mask))
    *others, of_keys = rows.strides
    assert of_keys == 1
    assert not any(stride % 16 for stride in others)


@runs
@pytest.mark.parametrize("layout", AS_THEY_ARE)
def test_aligned_rows_are_read_as_they_are(layout: str) -> None:
    mask = AS_THEY_ARE[layout](dtype=torch.float16)
    rows = MaskRows.of(mask, pins=False)
    assert not rows.steps
    assert torch.equal(read(rows, mask), mask)


@runs
def test_what_all_share_is_copied_once() -> None:
    rows = MaskRows.of(COPIED["one for all"](dtype=torch.bool), pins=False)
    assert rows.elements == 20 * 48
    assert rows.strides == (0, 0, 48, 1)
