"""Ask which config attention takes for a shape on a device, why no better one is known, and where its time goes.

python examples/explain_config.py
"""

from blocktune import AttentionShape, Causal, best_config, explain, occupancy


def main() -> None:
    shape = AttentionShape(batch=2, num_heads=32, seqlen_q=8192, head_dim=64, causal=Causal.UPPER_LEFT)
    print(best_config(shape, device="h200"))
    print()

    analysis = explain(shape, device="h200")  # compiles the config, which needs no GPU
    print(analysis)
    print()

    resources = analysis.occupied.resources
    thinner = occupancy(num_warps=resources.num_warps, registers=64, shared_bytes=resources.shared_bytes, device="h200")
    print(f"with 64 registers per thread: {thinner.blocks_per_sm} on an SM, limited by {', '.join(thinner.limiters)}")


if __name__ == "__main__":
    main()
