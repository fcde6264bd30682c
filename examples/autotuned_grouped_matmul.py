"""The products of a mixture of experts under `blocktune.autotune`; the winners as the JSON that vLLM and SGLang read.

python examples/autotuned_grouped_matmul.py [FOLDER]

Rows stand in the order of their experts, and each expert has a matrix of its own. On a GPU the product is tuned for
several numbers of tokens, and FOLDER gets `E=8,N=2048,device_name=NVIDIA_H200.json`, which both servers look for in
their folder of fused-experts configs. Without a GPU it compiles a config for an H200 and explains it.
"""

import json
import sys
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton import language as tl

from blocktune import autotune, offline, space

EXPERTS, COLUMNS, INNER = 8, 2048, 4096


@autotune(
    configs=space(
        BLOCK_SIZE_M=(16, 64, 128),
        BLOCK_SIZE_N=(64, 128),
        BLOCK_SIZE_K=(64,),
        GROUP_SIZE_M=(1, 16),
        num_warps=(4, 8),
        num_stages=(3, 4),
    ),
    key=["tokens", "columns", "inner", "EXPERTS"],
)
@triton.jit
def grouped_matmul_kernel(
    a,
    b,
    c,
    ends,
    tokens,
    columns,
    inner,
    EXPERTS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """c = a b[expert of the row]; `ends` holds the last row of each expert, plus one."""
    place, tiles_n = tl.program_id(0), tl.cdiv(columns, BLOCK_SIZE_N)
    group = place // (GROUP_SIZE_M * tiles_n)
    tiles_m = tl.num_programs(0) // tiles_n
    size = min(tiles_m - group * GROUP_SIZE_M, GROUP_SIZE_M)
    tile = group * GROUP_SIZE_M + (place % (GROUP_SIZE_M * tiles_n)) % size
    tile_n = (place % (GROUP_SIZE_M * tiles_n)) // size
    weights, of_one = b, inner.to(tl.int64) * columns
    first, end, start, tiles = 0, 0, 0, 0
    for each in range(EXPERTS):
        last = tl.load(ends + each)
        here = tl.cdiv(last - start, BLOCK_SIZE_M)
        if (tile >= tiles) & (tile < tiles + here):
            weights, first, end = b + each * of_one, start + (tile - tiles) * BLOCK_SIZE_M, last
        tiles += here
        start = last
    if first < end:
        rows = first + tl.arange(0, BLOCK_SIZE_M)
        outputs = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        steps = tl.arange(0, BLOCK_SIZE_K)
        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
        for k in range(0, inner, BLOCK_SIZE_K):
            inside = k + steps < inner
            of_a = tl.load(a + rows[:, None] * inner + k + steps, (rows < end)[:, None] & inside, other=0.0)
            of_b = tl.load(
                weights + (k + steps)[:, None] * columns + outputs, inside[:, None] & (outputs < columns), other=0.0
            )
            total = tl.dot(of_a, of_b, total)
        kept = (rows < end)[:, None] & (outputs < columns)
        tl.store(c + rows[:, None] * columns + outputs, total.to(c.dtype.element_ty), kept)


def grouped_matmul(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each row with the matrix of its expert: a [tokens, inner], b [experts, inner, columns]."""
    (tokens, inner), (experts, _, columns) = a.shape, b.shape
    c = torch.empty(tokens, columns, dtype=a.dtype, device=a.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        tiles = triton.cdiv(tokens, meta["BLOCK_SIZE_M"]) + experts  # each expert may begin a tile of its own
        return (tiles * triton.cdiv(columns, meta["BLOCK_SIZE_N"]),)

    grouped_matmul_kernel[grid](a, b, c, ends, tokens, columns, inner, EXPERTS=experts)
    return c


def expert_config_file(folder: Path, device_name: str) -> Path:
    """Write the winners of this process by number of tokens, under the name that vLLM and SGLang look for."""
    winners = {}
    for problem, choice in grouped_matmul_kernel.kernel.choices.items():
        config = choice.launched
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        winners[str(dict(problem.arguments)["tokens"])] = {**config.kwargs, **options}
    path = folder / f"E={EXPERTS},N={COLUMNS},device_name={device_name.replace(' ', '_')}.json"
    path.write_text(json.dumps(dict(sorted(winners.items(), key=lambda item: int(item[0]))), indent=4) + "\n")
    return path


def on_the_gpu(folder: Path) -> None:
    b = torch.randn(EXPERTS, INNER, COLUMNS, device="cuda", dtype=torch.bfloat16)
    for tokens in (64, 1024, 16384):
        a = torch.randn(tokens, INNER, device="cuda", dtype=torch.bfloat16)
        ends = torch.linspace(0, tokens, EXPERTS + 1, device="cuda").to(torch.int32)[1:].contiguous()
        found, begin = grouped_matmul(a, b, ends), 0
        for expert, end in enumerate(ends.tolist()):
            torch.testing.assert_close(found[begin:end], a[begin:end] @ b[expert], rtol=2e-2, atol=2.0)
            begin = end
    print(expert_config_file(folder, torch.cuda.get_device_name()).read_text())


def without_a_gpu() -> None:
    signature = "*bf16, *bf16, *bf16, *i32, i32:16, i32:16, i32:16"
    config = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 16, "EXPERTS": EXPERTS}
    config |= {"num_warps": 8, "num_stages": 3}
    print(offline.compile(grouped_matmul_kernel, signature, config, device="h200"))


if __name__ == "__main__":
    on_the_gpu(Path(sys.argv[1] if len(sys.argv) > 1 else ".")) if torch.cuda.is_available() else without_a_gpu()
