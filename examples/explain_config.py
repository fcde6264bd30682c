"""Ask which config attention takes for a shape on a device, where it comes from, and why no better one is known.

python examples/explain_config.py
"""

from blocktune import AttentionShape, Causal, best_config


def main() -> None:
    for seqlen in (1024, 8192, 10_000):
        shape = AttentionShape(
            batch=2, num_heads=32, seqlen_q=seqlen, head_dim=64, dtype="bfloat16", causal=Causal.UPPER_LEFT
        )
        print(best_config(shape, device="h200"))
        print()


if __name__ == "__main__":
    main()
