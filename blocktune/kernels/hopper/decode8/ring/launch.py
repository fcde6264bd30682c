"""From a config of the ring to its launches, on the host: those of decoding, with this kernel as the first."""

from dataclasses import replace
from functools import partial
from typing import Any

from blocktune.kernels.base.flash_kernel import LOG2_E
from blocktune.kernels.base.steps import new_memory
from blocktune.kernels.hopper.decode.kernel import packed_rows
from blocktune.kernels.hopper.decode.strides import sizes, trailing
from blocktune.kernels.hopper.decode8.ring.arguments import Options
from blocktune.kernels.hopper.decode8.ring.device_kernel import flash_decode8_ring_kernel
from blocktune.kernels.portable.decode.launch import DecodeLaunch, decode_launch, workspace_elements
from blocktune.kernels.portable.decode8.launch import scale_strides
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape, Causal


def ring_launch(config: KernelConfig, shape: AttentionShape, *, batch_invariant: bool = False) -> DecodeLaunch:
    """Return the launch of a config for tensors of this shape; arguments as of `decode_launch`.

    Raises:
        ValueError: there are more rows than the tile has, of which a block would leave out the last ones.
    """
    rows = packed_rows(shape)
    if rows > config.block_m:
        raise ValueError(f"The tile has {config.block_m} rows, but {shape.label} has {rows}. Take a larger block_m.")
    fixed = (*sizes(shape).values(), options_of(config, shape))
    return replace(
        decode_launch(config, shape, batch_invariant=batch_invariant),
        function=flash_decode8_ring_kernel,
        grid=(shape.num_heads_kv, config.parameters["splits"], shape.batch),
        leading=partial(_leading, workspace_elements(config, shape)),
        trailing=partial(trailing, fixed),
        options={"num_warps": config.num_warps},
    )


def options_of(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of a config."""
    splits = config.parameters["splits"]
    return Options(
        WIDTH=shape.head_dim,
        PAGE_SIZE=shape.features.page_size,
        CAUSAL=shape.causal is not Causal.NONE,
        FROM_START=shape.causal is Causal.UPPER_LEFT,
        ROWS=config.block_m,
        KEYS=config.block_n,
        SPLITS=splits,
        STAGES=config.num_stages,
        OVERLAP=config.parameters["overlap"] == 1 and splits > 1,
        OF_TOKENS=shape.features.token_scales,
    )


def _leading(
    workspace: int, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS
) -> tuple[Any, ...]:
    """Return the arguments that change with every call, a new workspace of `workspace` elements among them, if any."""
    work = None
    if workspace:
        import torch

        lse, work = None, new_memory(workspace, torch.float32, q.device)
    table = extras.block_table
    scales = extras.scale_k, extras.scale_v
    strides = (stride for one in scales for stride in scale_strides(one))
    return (
        *(q, k, v, out, lse, work, extras.cache_seqlens, table, scale * LOG2_E),
        0 if table is None else table.stride(0),
        *scales,
        *strides,
    )
