"""A plugin of SGLang: its FlashAttention back-end with blocktune's kernels."""

from typing import Any

NAME = "fa3"


def register() -> None:
    """Let SGLang take this back-end under the name of FlashAttention-3's, which models and settings ask for."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    theirs = ATTENTION_BACKENDS[NAME]

    @register_attention_backend(NAME)
    def create(runner: Any) -> Any:
        """Return the back-end of a runner: ours where theirs is FlashAttention's, on a GPU that it accepts."""
        from blocktune_sglang.backend import BlocktuneBackend, FlashAttentionBackend

        made = theirs(runner)
        if type(made) is not FlashAttentionBackend or runner.use_mla_backend:
            return made
        return BlocktuneBackend(runner)
