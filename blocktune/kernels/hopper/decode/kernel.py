"""Decoding on Hopper in one launch: every warp has keys of its own in registers, and the last block merges the shares.

The device functions are in tiles.py and merges.py of this folder. This kernel takes 16-bit types, head dimensions that
are multiples of 8 up to 128, full or causal, over contiguous keys, a cache of which every entry is filled to its own
length, or pages, and leaves everything else to `flash_decode`.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from blocktune.kernels.base.feature_arguments import sinks_of
from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, LOG2_E
from blocktune.kernels.base.kernel import MIN_HEAD_DIM, AttentionKernel, CompileSpec, SoftmaxCost
from blocktune.kernels.base.launch import ExtrasLaunch, TritonLaunch
from blocktune.kernels.base.loops import DecodeLoops
from blocktune.kernels.base.on_chip import OnChip, register_tile, shared_tile
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.hardware.limits import MULTIPROCESSORS, WARP_SIZE, ComputeLimits
from blocktune.kernels.hopper.common.descriptors import is_describable
from blocktune.kernels.hopper.decode.arguments import Options
from blocktune.kernels.hopper.decode.device_kernel import flash_decode_hopper_kernel
from blocktune.kernels.hopper.decode.strides import WORD_BYTES, example_strides, sizes, trailing, word_stride
from blocktune.kernels.portable.decode.defaults import visible_keys
from blocktune.kernels.portable.decode.kernel import MAX_PAGE, folded_decode
from blocktune.kernels.portable.decode.scratch import scratch
from blocktune.kernels.portable.decode.shares import fastest_splits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape, Causal

WIDTHS = (64, 128)
"""Columns of a tile: a warp loads 64 of a value at once, and more than 128 leave no registers for a tile. What a head
has less is filled up with zeros."""
ALIGNED_ELEMENTS = 8
"""Of a head: a thread loads 16 bytes or none."""
HALF_TILE = 8
"""Rows of a product's smallest tile; block_m is two of them."""
MAX_ROWS = 2 * HALF_TILE
"""Packed rows, which read all keys once; with 32 it took 1.3 to 1.5 times as long as `flash_decode` on an H200."""
MIN_KEYS = 16
"""Keys of a warp's tile: one product sums over this many."""
MAX_WORDS = 184
"""32-bit registers of a thread for the tile in flight, queries, scores and output: with more the compiler spills."""
DEFAULT_TILE = (128, 8)
"""block_n and num_warps of a block that is alone on its multiprocessor."""
LARGE_TILE, MANY_KEYS = (256, 8), 2048
"""That of blocks which read this many keys of head_dim 64 or more: 4 to 6 % faster on an H200."""
FEW_BYTES = 96
"""Columns of the wider tile up to which two blocks took 2 to 8 % less time than one on an H200."""
PAIRED_KEYS = 1024
"""Keys that each of two blocks of a multiprocessor reads at least; with fewer, merging costs what a second gains."""
LONG_STREAM_BYTES = 1 << 28
"""Of keys and values; beyond it `stream` made no difference or a loss of 4 % on an H200, and a gain up to it."""
MIN_PAGE = 16
"""Keys that a warp loads at once lie in one page."""
MAX_BATCH = 65535
"""Blocks of a grid's third dimension."""
MAX_WORKSPACE = (1 << 31) - 1
"""Floats of it are counted with 32 bits."""
MAX_WORD_OFFSET = 1 << 31
"""Offsets inside the keys of an entry are counted in words of 32 bits."""


class FlashDecodeHopper(AttentionKernel):
    """Split-KV decoding with packed query heads in one launch. block_n counts the keys of all warps of a block.

    splits: shares of the keys, each a block of its own. stream: keys and values leave the L2 cache first.
    """

    name = "flash_decode_hopper"
    loops = DecodeLoops(merges_itself=True)
    levelling_splits = 4
    """Shares of many keys at least where entries of a cache have their own lengths: 3 to 25 % faster on an H200."""
    features: ClassVar[frozenset[str]] = frozenset({"cached", "paged"})
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16,),
        "block_n": (64, 128, 256, 512),
        "num_warps": (4, 8),
        "num_stages": (1,),
        "splits": (1, 2, 4, 8, 16, 32, 64),
        "stream": (0, 1),
    }
    follows_shape: ClassVar[tuple[str, ...]] = ("splits", "stream")

    function: ClassVar[Any] = flash_decode_hopper_kernel
    head_dims: ClassVar[range | tuple[int, ...]] = range(MIN_HEAD_DIM, WIDTHS[-1] + 1, ALIGNED_ELEMENTS)

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if limits.cc != (9, 0):
            return f"{self.name} was measured on Hopper (compute capability 9.0) alone, but got {limits.name}"
        if shape.element_bytes != 2:
            return f"{self.name} computes float16 and bfloat16, but got {shape.dtype}"
        for name, dim in (("head_dim", shape.head_dim), ("head_dim_v", shape.head_dim_v)):
            if dim not in self.head_dims:
                return f"`{name} in {self.head_dims}` must hold for {self.name}, but got {name}={dim}"
        rows = packed_rows(shape)
        if rows > MAX_ROWS:
            return f"`group_size * seqlen_q <= {MAX_ROWS}` must hold for {self.name}, but got {rows} rows"
        if shape.batch > MAX_BATCH:
            return f"`batch <= {MAX_BATCH}` must hold for {self.name}, but got batch={shape.batch}"
        page = shape.features.page_size
        if page and not MIN_PAGE <= page <= MAX_PAGE:
            return f"`{MIN_PAGE} <= page_size <= {MAX_PAGE}` must hold for {self.name}, but got page_size={page}"
        return None

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the broken rules, besides the range of every parameter: a warp's keys are a whole tile, and fit its
        registers."""
        problems = super().rule_violations(config, shape, limits)
        if problems:
            return problems
        keys, words = config.block_n // config.num_warps, _words(config, shape)
        if keys < MIN_KEYS or words > MAX_WORDS:
            return (
                f"`block_n / num_warps >= {MIN_KEYS}` keys a warp and `tiles <= {MAX_WORDS}` registers a thread must "
                f"hold for {self.name}, but got {keys} and {words}. Take another block_n.",
            )
        if _workspace(config, shape) > MAX_WORKSPACE:
            return (
                f"`splits * rows * (columns of a tile + 2) <= {MAX_WORKSPACE}` must hold for {self.name}, but got "
                f"{_workspace(config, shape)}. Take fewer splits.",
            )
        return ()

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes where the warps' outputs, maxima and sums meet, in float32."""
        del limits
        return config.num_warps * rows_of_tile(shape) * (tile_width(shape.head_dim_v) + 2) * FLOAT32_BYTES

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return what was best on an H200 or within 6 % of it: shares that keep all multiprocessors busy with a block
        of eight warps, or with two of `paired_tile` where these have many keys each."""
        del limits
        pair = self.paired_tile(shape)
        if pair is not None:
            splits = self._fastest_splits(shape, pair[0], 2 * MULTIPROCESSORS)
            if visible_keys(shape) >= PAIRED_KEYS * splits and _fills(shape, splits, 2 * MULTIPROCESSORS):
                return self._of_shares(shape, pair, splits)
        splits = self._fastest_splits(shape, DEFAULT_TILE[0], MULTIPROCESSORS)
        return self._of_shares(shape, self.lone_tile(shape, splits), splits)

    def lone_tile(self, shape: AttentionShape, splits: int) -> tuple[int, int]:
        """Return block_n and num_warps of a block that is alone on its multiprocessor."""
        return LARGE_TILE if _is_narrow(shape) and visible_keys(shape) >= MANY_KEYS * splits else DEFAULT_TILE

    def paired_tile(self, shape: AttentionShape) -> tuple[int, int] | None:
        """Return block_n and num_warps of blocks of which a multiprocessor holds two, where these are faster than one
        that is larger: over many entries of their own lengths, which end at different times, where the columns of a
        tile are so few that one has too few bytes on the way, and with 16 rows of head_dim 128, over which a warp takes
        long enough for the keys of another one to arrive."""
        many = shape.batch * shape.num_heads_kv > MULTIPROCESSORS // 2
        sparse = WIDTHS[0] < max(shape.head_dim, shape.head_dim_v) <= FEW_BYTES
        if (sparse or (shape.features.cached and many)) and rows_of_tile(shape) == HALF_TILE:
            return DEFAULT_TILE[0], 4
        return None if _is_narrow(shape) or rows_of_tile(shape) == HALF_TILE else (4 * MIN_KEYS, 4)

    def _fastest_splits(self, shape: AttentionShape, block_n: int, resident: int) -> int:
        allowed, blocks, keys = self.parameters["splits"], shape.batch * shape.num_heads_kv, visible_keys(shape)
        if shape.features.cached and keys >= self.levelling_splits * MANY_KEYS:
            allowed = tuple(splits for splits in allowed if splits >= self.levelling_splits)
        return fastest_splits(allowed, blocks, resident, keys, block_n)

    def _of_shares(self, shape: AttentionShape, tile: tuple[int, int], splits: int) -> KernelConfig:
        once = int(_key_bytes(shape) <= LONG_STREAM_BYTES)
        return KernelConfig(self.name, 2 * HALF_TILE, *tile, 1, (("splits", splits), ("stream", once)))

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return SoftmaxCost(merges_inside=True, lone_warps=True)

    def as_forward(self, config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        return config, folded_decode(config.parameters["splits"], shape)

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return the tiles: every warp has keys, queries and an output of its own; their outputs meet in shared memory
        at the end."""
        n, short, tile_rows = config.block_n, shape.element_bytes, rows_of_tile(shape)
        rows, width, width_v = config.num_warps * tile_rows, tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        return OnChip(
            tiles=(
                register_tile("Q", rows, width, short),
                register_tile("K", n, width, shape.kv_bytes),
                register_tile("V", n, width_v, shape.kv_bytes),
                register_tile("S", n, tile_rows, FLOAT32_BYTES),
                register_tile("P", n, tile_rows, short, reuses=True),
                register_tile("O", rows, width_v, FLOAT32_BYTES),
                *(register_tile(name, rows, 1, FLOAT32_BYTES) for name in "ml"),
                shared_tile("O of all warps", rows, width_v, FLOAT32_BYTES),
                *(shared_tile(f"{name} of all warps", rows, 1, FLOAT32_BYTES) for name in "ml"),
            ),
            num_warps=config.num_warps,
        )

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        return words_problem(self.name, k, v) or super().layout_problem(q, k, v)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(self.function)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        arguments = self.example_arguments(config, shape)
        return specialize(self.function, arguments, {"num_warps": config.num_warps})

    def example_arguments(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        """Return the arguments of a launch for contiguous tensors."""
        features, merged = shape.features, config.parameters["splits"] > 1
        integers = TensorArgument("int32")
        arguments: dict[str, Any] = {name: TensorArgument(shape.dtype) for name in ("Q", "K", "V", "Out")}
        arguments |= {"Lse": None, "Work": TensorArgument("float32") if merged else None}
        arguments |= {"Counter": integers if merged else None, "Lengths": integers if features.cached else None}
        arguments |= {"Table": integers if features.page_size else None, "Sinks": None}
        arguments |= {"scale_log2": 1.0, "stride_table": 0}
        return arguments | example_strides(shape) | sizes(shape) | {"OPTIONS": self.options(config, shape)}

    def options(self, config: KernelConfig, shape: AttentionShape) -> Options:
        """Return the constants of a config; the units of the strides stand apart."""
        return Options(
            HEAD_DIM=shape.head_dim,
            HEAD_DIM_V=shape.head_dim_v,
            WIDTH=tile_width(shape.head_dim),
            WIDTH_V=tile_width(shape.head_dim_v),
            PAGE_SIZE=shape.features.page_size,
            CAUSAL=shape.causal is not Causal.NONE,
            FROM_START=shape.causal is Causal.UPPER_LEFT,
            ROWS=rows_of_tile(shape),
            BLOCK_N=config.block_n,
            SPLITS=config.parameters["splits"],
            STREAM=bool(config.parameters["stream"]),
            OF_TOKENS=shape.features.token_scales,
        )

    def leading(
        self, counters: int, floats: int, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the arguments that change with every call, `counters` and `floats` of workspace among them."""
        work, counter = scratch(q.device, counters, floats) if counters else (None, None)
        table = extras.block_table
        lengths = extras.cache_seqlens
        return (
            *(q, k, v, out, lse, work, counter, lengths, table, sinks_of(extras), scale * LOG2_E),
            0 if table is None else table.stride(0),
        )

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        return self._bind(config, shape, takes_extras=bool(shape.features))

    def bind_with_sinks(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        return self._bind(config, shape, takes_extras=True)

    def _bind(self, config: KernelConfig, shape: AttentionShape, *, takes_extras: bool) -> TritonLaunch:
        splits = config.parameters["splits"]
        needed = (shape.batch * shape.num_heads_kv, _workspace(config, shape)) if splits > 1 else (0, 0)
        return (ExtrasLaunch if takes_extras else TritonLaunch)(
            self.function,
            (shape.num_heads_kv, splits, shape.batch),
            partial(self.leading, *needed),
            partial(trailing, (*sizes(shape).values(), self.options(config, shape))),
            {"num_warps": config.num_warps},
        )


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile that holds heads of this dimension."""
    return next(width for width in WIDTHS if width >= head_dim)


def rows_of_tile(shape: AttentionShape) -> int:
    """Return the rows of the tile of a key head's rows: a product's smallest, or two of them.

    Raises:
        ValueError: there are more, of which a block would leave out the last ones.
    """
    rows = packed_rows(shape)
    if rows > MAX_ROWS:
        raise ValueError(f"One tile has at most {MAX_ROWS} rows, but {shape.label} has {rows}. Take flash_decode.")
    return HALF_TILE if rows <= HALF_TILE else 2 * HALF_TILE


def words_problem(kernel: str, k: Any, v: Any) -> str | None:
    """Return why keys and values cannot be read in words of 32 bits, four at once, for the kernel of this name; or
    None."""
    for name, tensor in (("key", k), ("value", v)):
        if not is_describable(tensor) or tensor.shape[2] * word_stride(tensor, 2) >= MAX_WORD_OFFSET:
            return (
                f"rows of {name} must be contiguous, 16 must divide its address and its strides in bytes, and the "
                f"keys of an entry must span less than 8 GiB, for {kernel}"
            )
    return None


def packed_rows(shape: AttentionShape) -> int:
    """Return the rows of a key head: those of all queries of its group."""
    return shape.group_size * shape.seqlen_q


def _is_narrow(shape: AttentionShape) -> bool:
    """Return whether keys and values have the fewest columns."""
    return max(shape.head_dim, shape.head_dim_v) <= WIDTHS[0]


def _fills(shape: AttentionShape, splits: int, wanted: int) -> bool:
    """Return whether these splits make three quarters of the wanted blocks."""
    return 4 * shape.batch * shape.num_heads_kv * splits >= 3 * wanted


def _key_bytes(shape: AttentionShape) -> int:
    """Return the bytes of all keys and values."""
    dims = shape.head_dim + shape.head_dim_v
    return shape.batch * shape.num_heads_kv * visible_keys(shape) * dims * shape.kv_bytes


def _workspace(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the floats of all shares' outputs, maxima and sums."""
    rows = shape.batch * shape.num_heads * shape.seqlen_q
    return config.parameters["splits"] * rows * (tile_width(shape.head_dim_v) + 2)


def _words(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the registers of a thread for keys and values of a tile, queries of 16 bits, scores and output."""
    keys, rows = config.block_n // config.num_warps, rows_of_tile(shape)
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    key_bytes = keys * (width + width_v) * shape.kv_bytes
    row_bytes = rows * (width * shape.element_bytes + (width_v + keys) * FLOAT32_BYTES)
    return (key_bytes + row_bytes) // (WARP_SIZE * WORD_BYTES)
