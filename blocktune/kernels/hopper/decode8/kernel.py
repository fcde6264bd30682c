"""Decoding over 8-bit caches on Hopper in one launch: `flash_decode_hopper` with the operands of `flash_decode8`."""

from typing import Any, ClassVar

from blocktune.kernels.base.specialize import TensorArgument
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hopper.decode.kernel import DEFAULT_TILE, HALF_TILE, WIDTHS, FlashDecodeHopper, rows_of_tile
from blocktune.kernels.hopper.decode8.device_kernel import flash_decode8_hopper_kernel
from blocktune.kernels.portable.decode8.kernel import ELEMENTS
from blocktune.kernels.portable.decode8.launch import scale_strides
from blocktune.kernels.portable.decode8.tiles import SCALE_STRIDES
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape


class FlashDecode8Hopper(FlashDecodeHopper):
    """Split-KV decoding over 8-bit keys and values in one launch."""

    name = "flash_decode8_hopper"
    dtypes = frozenset(("float16", "bfloat16"))
    levelling_splits = 1
    """More were not measured with 8-bit keys."""
    features: ClassVar[frozenset[str]] = FlashDecodeHopper.features | {"kv=e4m3", "kv=int8", "token_scales"}
    function: ClassVar[Any] = flash_decode8_hopper_kernel
    head_dims = WIDTHS

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if not shape.features.is_short:
            return f"{self.name} reads caches of 8 bits, but got keys and values of {shape.dtype}"
        return super().shape_problem(shape, limits)

    def lone_tile(self, shape: AttentionShape, splits: int) -> tuple[int, int]:
        """Return the tile of all blocks that are alone: larger ones were not measured with 8-bit keys."""
        del shape, splits
        return DEFAULT_TILE

    def paired_tile(self, shape: AttentionShape) -> tuple[int, int] | None:
        """Return the tile of a block that is alone: words of half the size leave a multiprocessor the registers of two,
        with up to 8 rows."""
        return DEFAULT_TILE if rows_of_tile(shape) == HALF_TILE else None

    def example_arguments(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        keys, numbers = TensorArgument(ELEMENTS[shape.features.kv]), TensorArgument("float32")
        arguments = super().example_arguments(config, shape) | {"K": keys, "V": keys}
        return arguments | {"KScales": numbers, "VScales": numbers} | dict.fromkeys(SCALE_STRIDES, 0)

    def leading(
        self, counters: int, floats: int, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Any, ...]:  # fmt: skip
        scales = extras.scale_k, extras.scale_v
        strides = (stride for one in scales for stride in scale_strides(one))
        return *super().leading(counters, floats, q, k, v, out, lse, scale, extras), *scales, *strides
