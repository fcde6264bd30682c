"""How other libraries come to use blocktune. Nothing here acts on import; every integration is a call that asks for it.

from blocktune.integrations import register_with_diffusers, register_with_transformers
from blocktune.integrations import replace_sdpa_flash, restore_sdpa_flash

model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register_with_transformers())
pipe.transformer.set_attention_backend(register_with_diffusers())

replace_sdpa_flash()  # as torch.nn.attention.activate_flash_attention_impl("blocktune")
restore_sdpa_flash()
"""

from blocktune.runtime.api.hugging_face.diffusion import register_with_diffusers
from blocktune.runtime.api.hugging_face.registration import register_with_transformers
from blocktune.runtime.provider.registration import replace_sdpa_flash, restore_sdpa_flash

__all__ = ["register_with_diffusers", "register_with_transformers", "replace_sdpa_flash", "restore_sdpa_flash"]
