"""Run a model of Hugging Face transformers with blocktune. The model is tiny and random, so nothing is downloaded.

python examples/hugging_face.py
"""

import torch

from blocktune.integrations import register_with_transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}


def main() -> None:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        print("skipped: this example needs transformers. Install it by: pip install 'blocktune[huggingface]'")
        return
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 24))
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        before = model(tokens).logits
        model.set_attn_implementation(register_with_transformers())
        after = model(tokens).logits
    print(f"attention: {model.config._attn_implementation}")
    print(f"largest difference of the logits: {(after - before).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
