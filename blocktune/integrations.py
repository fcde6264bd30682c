"""How other libraries come to use blocktune. Nothing here acts on import; every integration is a call that asks for it.

from blocktune.integrations import register_with_diffusers, register_with_transformers
from blocktune.integrations import replace_sdpa_flash, restore_sdpa_flash
from blocktune.integrations import BatchAttention, PagedBatch

model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register_with_transformers())
pipe.transformer.set_attention_backend(register_with_diffusers())

replace_sdpa_flash()  # as torch.nn.attention.activate_flash_attention_impl("blocktune")
restore_sdpa_flash()

layer = BatchAttention(scale=head_dim**-0.5)  # of a serving engine
served = layer.write(out, q, k_pages, v_pages, PagedBatch(begins, lengths, block_table, longest))
"""

from blocktune.runtime.api.cache.paged_batch import BatchAttention, PagedBatch
from blocktune.runtime.api.hugging_face.diffusion import register_with_diffusers
from blocktune.runtime.api.hugging_face.registration import register_with_transformers
from blocktune.runtime.provider.registration import replace_sdpa_flash, restore_sdpa_flash

__all__ = [
    "BatchAttention",
    "PagedBatch",
    "register_with_diffusers",
    "register_with_transformers",
    "replace_sdpa_flash",
    "restore_sdpa_flash",
]
