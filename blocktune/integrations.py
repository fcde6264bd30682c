"""How other libraries come to use blocktune. Nothing here acts on import; every integration is a call that asks for it.

from blocktune.integrations import register_with_transformers

model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register_with_transformers())
"""

from blocktune.kernels.transformers_attention import register_with_transformers

__all__ = ["register_with_transformers"]
