"""flash-attention 2's package with blocktune's kernels: `import blocktune.flash_attn as flash_attn`.

`flash_attn_3` has the functions of FlashAttention-3, `cute` those of FlashAttention-4, each with the signatures of its
own. `alias()` lets `import flash_attn` of this process find this package.
"""

from blocktune.flash_attn.alias import VERSION as __version__
from blocktune.flash_attn.alias import alias
from blocktune.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "__version__",
    "alias",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
