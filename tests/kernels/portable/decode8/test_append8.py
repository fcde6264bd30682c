"""New rows in an 8-bit cache by one kernel: what PyTorch rounds and writes, and nothing else."""

from pathlib import Path

import pytest
import torch

from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.portable.decode8.append import Append8Launch, append8_kernel, append8_obstacle
from blocktune.kernels.values.shape import FP8
from blocktune.kernels.values.short_numbers import BOUNDS, quantize
from blocktune.runtime.api.cache.appending import positions_from
from blocktune.runtime.api.cache.rows import CacheRows
from blocktune.tuner.compile.compiler import compiled_code, resources_of
from tests.kernels.portable.decode.test_append import int32, new_rows
from tests.support.triton_modes import DEVICE, compiled_here, runs

pytestmark = pytest.mark.interpreted


@runs
@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("sizes", [None, (1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("number", [None, 7])
def test_rows_are_rounded_and_come_after_those_that_are_there(
    number: int | None, paged: bool, sizes: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    rows, entries = (16, 9) if paged else (32, 3)
    k, v = new_rows(5)
    k[0, 0, 0, :4] = torch.tensor([1e6, -1e6, 0.5, 2.5])  # beyond the type, and halves of int8
    caches = [torch.randint(0, 100, (entries, rows, 2, dim), dtype=torch.int8, device=DEVICE) for dim in (16, 24)]
    scales = [None if sizes is None else 0.01 + torch.rand(sizes, device=DEVICE) for _ in range(2)]
    table = int32([3, 0], [5, 1], [2, 6]) if paged else None
    lengths = int32(0, 14, 27) if number is None else int32(7, 7, 7)
    wanted, after = [cache.clone() for cache in caches], torch.empty_like(lengths)
    for cache, new, scale in zip(wanted, (k, v), scales, strict=True):
        factor = 1.0 if scale is None else scale[:, None, :, None]
        short = quantize(new, factor, dtype).view(torch.int8)
        CacheRows(table=table).write(cache, short, positions_from(lengths, 5))
    k_cache, v_cache = (cache.view(dtype) for cache in caches)
    launch = Append8Launch(32, 16 if paged else 0)
    launch(k_cache, v_cache, k, v, lengths if number is None else None, table, *scales, after, number or 0)
    for cache, right in zip(caches, wanted, strict=True):
        assert torch.equal(cache.view(dtype).float(), right.view(dtype).float())
    assert torch.equal(after, lengths + 5)
    assert float(k_cache.float().amax()) == BOUNDS[dtype][1]


@runs
def test_rows_that_the_cache_has_no_room_for_are_not_written() -> None:
    k_cache, v_cache = (torch.zeros(3, 8, 2, dim, dtype=torch.int8, device=DEVICE) for dim in (16, 24))
    k, v = (torch.ones(3, 3, 2, dim, device=DEVICE) for dim in (16, 24))
    Append8Launch(8, 0)(k_cache, v_cache, k, v, int32(6, 100, -9), None, None, None, int32(0, 0, 0), 0)
    assert int(k_cache.sum()) == 2 * 2 * 16
    assert int(v_cache.sum()) == 2 * 2 * 24


@compiled_here
@pytest.mark.parametrize(("cc", "cache"), [((8, 0), "int8"), ((9, 0), "int8"), ((9, 0), FP8), ((10, 0), FP8)], ids=str)
def test_it_compiles_for_architectures_that_are_not_here(
    cc: tuple[int, int], cache: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    short, rows, numbers, indices = (TensorArgument(name) for name in (cache, "bfloat16", "float32", "int32"))
    tensors = dict.fromkeys(("K_cache", "V_cache"), short) | dict.fromkeys(("K", "V"), rows)
    tensors |= dict.fromkeys(("KScales", "VScales"), numbers) | dict.fromkeys(("Lengths", "Table", "After"), indices)
    constants = {"DIM": 128, "DIM_V": 96, "WIDTH": 128, "WIDTH_V": 128, "HEADS": 16, "PAGE_SIZE": 16}
    given = {name: tensors.get(name, constants.get(name, 128)) for name in append8_kernel.arg_names}
    resources = resources_of(compiled_code(specialize(append8_kernel, given, {"num_warps": 4}), cc))
    assert resources.spill_bytes == 0


def test_what_the_kernel_cannot_append_is_said() -> None:
    k, v = new_rows(2)
    caches = [torch.zeros(3, 8, 2, dim).to(torch.float8_e4m3fn).to(DEVICE) for dim in (16, 24)]
    assert append8_obstacle(*caches, k, v, (8, 9)) is None
    assert "compute capability" in str(append8_obstacle(*caches, k, v, (8, 6)))
    assert append8_obstacle(*(cache.view(torch.int8) for cache in caches), k, v, (8, 0)) is None
    assert "heads" in str(append8_obstacle(*caches, v, v, (9, 0)))
