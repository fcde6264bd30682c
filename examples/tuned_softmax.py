"""Tune a Triton kernel of your own: the softmax of `row_softmax.py`, whose block size and warps are found by measuring.

python examples/tuned_softmax.py

On a GPU it searches and keeps the best parameters. Without one the reference computes, since Triton runs no kernel
there.
"""

import torch
from row_softmax import softmax

from blocktune import tune_function


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 2000, device="cuda" if torch.cuda.is_available() else "cpu")
    if x.is_cuda:
        tune_function(softmax, (x,))  # once, where you prepare
    rows = softmax(x)  # everywhere
    print(f"largest difference: {(rows - torch.softmax(x, dim=-1)).abs().max().item():.1e}")
    print(softmax.explain(x))


if __name__ == "__main__":
    main()
