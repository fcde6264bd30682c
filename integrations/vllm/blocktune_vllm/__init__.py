"""A plugin of vLLM: its FlashAttention back-end with blocktune's kernels."""

BACKEND = "blocktune_vllm.backend.BlocktuneBackend"


def register() -> None:
    """Let vLLM take this back-end wherever it takes FlashAttention's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.FLASH_ATTN, BACKEND)
