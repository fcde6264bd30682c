"""What every attention kernel tells about itself: all that search, model, store and dispatcher need to know."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from blocktune.kernels.base.backward_as_forward import folded_backward
from blocktune.kernels.base.loops import BackwardLoops, ForwardLoops, Loops, Visits
from blocktune.kernels.base.on_chip import ChipTile, OnChip
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256

Launch = Callable[..., None]
"""Enqueues a config's kernels on the current stream.

    forward:   launch(q, k, v, out, lse, scale[, extras])
    backward:  launch(q, k, v, out, lse, dout, dq, dk, dv, scale[, extras])

q [batch, num_heads, seqlen_q, head_dim], k and v [batch, num_heads_kv, seqlen_k, head_dim(_v)], out like q with
head_dim_v, lse float32 [batch, num_heads, seqlen_q], contiguous (natural log), or None in a forward; scale is
multiplied to q k^T; every gradient has the sizes of what it belongs to and is written whole. extras: `Extras`, given if
the shape has features, or 8-bit tensors have scales; the output of these is bfloat16. Packed sequences (varlen) are
[1, heads, tokens, dim], lse [num_heads, tokens]; a paged cache is [pages, num_heads_kv, page_size, dim]."""

Thunk = Callable[[], None]
"""A launch with its arguments bound to it."""


@dataclass(frozen=True)
class CompileSpec:
    """All that `triton.compile` needs for one config, specialized as the JIT does for contiguous, aligned tensors."""

    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[tuple[int, ...], Any]
    attrs: Mapping[tuple[int, ...], list[list[Any]]]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxCost:
    """What a config's softmax costs and hides, for the cost model. The defaults are the textbook online softmax.

    instructions_per_score: float32 and conversion instructions for every score, the exponential's own issue included:
    maximum (half rate, counts twice), multiply-add, exponential, sum, half a conversion. rescales: the accumulator is
    multiplied in every key tile. products_overlap: one of the two matrix products runs during the softmax.
    address_instructions: of every 16 bytes of a key tile that the threads copy themselves; the copy engine needs none.
    copying_warps: warps of the block that compute none of it, but move tiles or idle next to one that does. persistent:
    a block takes one tile of queries after another and fetches the next while it computes. products: matrix products of
    a tile, two in a forward. merge_overlaps: the launch that merges shares of the keys starts while the first one ends.
    merges_inside: no launch does, but the block of a head that ends last.
    adds_walked: of every tile a part of what belongs to the rows that are walked along is added to memory in float32.
    adds_ahead: the copy engine adds it while the block computes on. exchanges: warpgroups pass tiles to each other
    through shared memory. lone_warps: every warp walks along keys of its own and waits for no other. round_trip: keys
    stay and queries are walked along, whose outputs and statistics travel to memory and back with every tile.
    stages_per_tile: of `num_stages` that a tile of keys takes; two where its K and V have one each.
    """

    instructions_per_score: float = 5.5
    rescales: bool = True
    products_overlap: bool = False
    address_instructions: float = 0.0
    copying_warps: int = 0
    persistent: bool = False
    products: int = 2
    merge_overlaps: bool = False
    merges_inside: bool = False
    adds_walked: bool = False
    adds_ahead: bool = False
    exchanges: bool = False
    lone_warps: bool = False
    round_trip: bool = False
    stages_per_tile: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLaunch:
    """A launch of a config in addition to its longest one, as a plain forward for the models.

    config, shape: its grid and tiles.
    softmax: what it costs.
    shared_bytes: per block.
    """

    config: KernelConfig
    shape: AttentionShape
    softmax: SoftmaxCost
    shared_bytes: int


class AttentionKernel(ABC):
    """One implementation of a direction of attention.

    A new kernel is a folder with one subclass and one line in `registry.py`: what search, models, exports and ladder
    need to know of it stands here, and the defaults are those of an ordinary tiled forward or backward.
    """

    name: ClassVar[str]
    direction: ClassVar[Direction] = Direction.FORWARD
    features: ClassVar[frozenset[str]] = frozenset()
    """The `Features.names` that the kernel serves."""
    dtypes: ClassVar[frozenset[str]] = frozenset(("float16", "bfloat16", "float32"))
    """The data types that the kernel computes; of these it may refuse some for itself."""
    ladder_steps: ClassVar[tuple[str, ...]] = ()
    """The steps of its direction (tuner/compare/ladder_ideas.py) that the kernel may stand for."""
    flex_options: ClassVar[Mapping[str, bool] | None] = None
    """The options that make FlexAttention's template compute as this kernel does, besides the tile; None: none can."""
    historical: ClassVar[bool] = False
    """Kept to be compared with: it competes only when it is named."""
    largest_head_dim: ClassVar[int] = MAX_HEAD_DIM
    most_barrier_bytes: ClassVar[int] = 0
    """An upper bound of the shared memory that barriers take, where `shared_bytes` leaves them out."""
    parameters: ClassVar[Mapping[str, tuple[int, ...]]]
    """The choices of every searched parameter, smallest first: block_m, block_n, num_warps, num_stages and its own."""
    follows_shape: ClassVar[tuple[str, ...]] = ()
    """The parameters whose best value `default_config` computes from the shape: those of another shape are no guess."""

    def unsupported(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        """Return why the kernel cannot compute this shape on this compute capability, or None."""
        return self.kind_problem(shape) or self.shape_problem(shape, limits)

    def steps_back(self, shape: AttentionShape) -> bool:
        """Return whether the other kernels of a shape go first, though the registry names this one before them."""
        return False

    def kind_problem(self, shape: AttentionShape) -> str | None:
        """Return why the kernel computes nothing of this direction, data type and features, whatever the sizes; or
        None."""
        if shape.direction is not self.direction:
            return f"{self.name} computes {self.direction}, but got a {shape.direction} shape"
        if shape.dtype not in self.dtypes:
            return f"{self.name} computes {', '.join(sorted(self.dtypes))}, but got {shape.dtype}"
        missing = shape.features.names - self.features
        if missing:
            return f"{self.name} does not know {', '.join(sorted(missing))}"
        return None

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        """Return why the kernel cannot compute a shape of its direction and features, or None. A kernel that asks for
        more than head dimensions in range and room for its smallest blocks adds it."""
        return self.head_dim_problem(shape) or self._memory_problem(shape, limits)

    def head_dim_problem(self, shape: AttentionShape) -> str | None:
        """Return why a head dimension is out of the kernel's range, or None."""
        most = self.largest_head_dim
        for name, dim in (("head_dim", shape.head_dim), ("head_dim_v", shape.head_dim_v)):
            if not MIN_HEAD_DIM <= dim <= most:
                return f"`{MIN_HEAD_DIM} <= {name} <= {most}` must hold for {self.name}, but got {name}={dim}"
        return None

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the kernel's own rules that the config breaks; only what certainly cannot compile or run. A kernel
        that has more rules than the range of its parameters adds them."""
        del shape, limits
        own = config.parameters
        problems = [
            f"`{name}` of {self.name} must be one of {choices}, but got {own.get(name)}."
            for name, choices in self.parameters.items()
            if own.get(name) not in choices
        ]
        if len(own) > len(self.parameters):
            problems.append(f"{self.name} has the parameters {tuple(self.parameters)}, but got {own}.")
        return tuple(problems)

    def _memory_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        smallest = self.smallest_config()
        needed, limit = self.most_shared_bytes(smallest, shape, limits), limits.shared_per_block_optin_bytes
        if needed <= limit:
            return None
        return (
            f"`shared memory of the smallest blocks <= {limit} B` must hold for {self.name} on compute capability "
            f"{limits.name}, but head_dim {shape.head_dim} and head_dim_v {shape.head_dim_v} in {shape.dtype} need "
            f"{needed} B"
        )

    def smallest_config(self) -> KernelConfig:
        """Return the config that takes least memory: the first choice of every parameter."""
        return KernelConfig.of(self.name, {name: choices[0] for name, choices in self.parameters.items()})

    @abstractmethod
    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the dynamic shared memory of a block that the compiler will allocate, or a lower bound of it; of
        float32 with PyTorch's default precision (kernels/base/precision.py)."""

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return an upper bound of `shared_bytes` whatever the precision, by which defaults are chosen, so that they
        can be launched: that number and the barriers. A kernel that predicts a lower bound overrides this."""
        return self.shared_bytes(config, shape, limits) + self.most_barrier_bytes

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the columns of tensor memory that a block needs at least, of every launch; 0 where none is
        predicted."""
        del config, shape, limits
        return 0

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return an upper bound of `tensor_memory_columns`, as `most_shared_bytes` is one."""
        return self.tensor_memory_columns(config, shape, limits)

    def launch_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the dynamic shared memory of a block of the launch that `compile_spec` compiles.

        `shared_bytes` is the memory of the launch that needs most, so a kernel with several launches overrides this.
        """
        return self.shared_bytes(config, shape, limits)

    @abstractmethod
    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return a config that is good without any tuning; it breaks no rule."""

    @abstractmethod
    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        """Return what to compile offline: the code of a launch without log-sum-exp; imports triton. Where a config
        launches several functions it is the one that takes longest."""

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        """Return the other functions that the config launches, if any."""
        del config, shape
        return ()

    @abstractmethod
    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        """Return a launcher of this config for tensors of this shape; imports triton."""

    def bind_with_sinks(self, config: KernelConfig, shape: AttentionShape) -> Launch | None:
        """Return a launcher that takes extras whatever the features of the shape, and whose results have the sinks
        among them; None, of most kernels, leaves the sinks to a pass over the results."""
        del config, shape
        return None

    def bind_batch_invariant(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        """Return a launcher whose rows are equal to the bit whatever the batch is; a kernel whose launches depend on
        the batch in another way than by their grid overrides this."""
        return self.bind(config, shape)

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        """Return why the kernel cannot read these very tensors, whatever the config; or None."""
        if any(tensor.stride(-1) != 1 for tensor in (q, k, v)):
            return f"the last dimension of query, key and value must be contiguous for {self.name}"
        return None

    def cache_problem(self, k: Any, v: Any) -> str | None:
        """Return why the kernel cannot read the entries or pages of these very caches, whatever the config; or None."""
        del k, v
        return None

    @property
    @abstractmethod
    def source_hash(self) -> str:
        """16 hexadecimal digits that change with the kernel's device code."""

    def total_warps(self, config: KernelConfig) -> int:
        """Return the warps of a block once it is compiled; a kernel whose warps specialise has more than the config
        names."""
        return config.num_warps

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        """Return what the softmax of this config costs; a kernel whose configs differ in it overrides this."""
        del config
        return SoftmaxCost()

    def as_forward(self, config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        """Return a plain forward whose grid and tiles are those of this config's longest launch, for the models: config
        and shape themselves, or for a backward, whose blocks own keys and walk along the queries, both the other way
        round."""
        return (config, shape) if shape.direction is Direction.FORWARD else folded_backward(config, shape)

    def second_launch(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> SecondLaunch | None:
        """Return what follows the longest launch and takes comparably long, None if there is no such launch."""
        del config, shape, limits
        return None

    @property
    def loops(self) -> Loops:
        """How the launches walk along the tiles, from which the bytes that they move are counted."""
        if self.direction is Direction.BACKWARD:
            return BackwardLoops()
        return ForwardLoops(visits=Visits.FEATURES if self.features else Visits.CAUSAL)

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
        """Return what a block keeps on the chip, of a kernel that lists it itself; None stands for what an ordinary
        tiled forward or backward keeps, of the plain forward that `as_forward` returns or of the pass over keys."""
        del config, shape, limits
        return None

    def further_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[ChipTile, ...]:
        """Return what a block keeps on the chip in addition to the tiles of an ordinary forward or backward."""
        del config, shape, limits
        return ()

    def violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return why this config cannot run this shape on this device; empty means feasible. The single statement of
        feasibility: search, fallback and dispatcher all ask here. What is merely slow is left to `slow_reason`."""
        reason = self.unsupported(shape, limits)
        if reason is not None:
            return (reason,)
        problems = self.rule_violations(config, shape, limits)
        if problems:
            return problems
        needed = self.shared_bytes(config, shape, limits)
        if needed > limits.shared_per_block_optin_bytes:
            return (
                f"`shared memory <= {limits.shared_per_block_optin_bytes} B a block` must hold on compute capability "
                f"{limits.name}, but {config.label} needs {needed} B. Take smaller blocks or fewer stages.",
            )
        columns = self.tensor_memory_columns(config, shape, limits)
        if columns > limits.tensor_memory_columns:
            return (
                f"`tensor memory <= {limits.tensor_memory_columns} columns a block` must hold on compute capability "
                f"{limits.name}, but {config.label} needs {columns}. Take smaller blocks.",
            )
        return ()

    def slow_reason(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        """Return why a config that may run is certainly slow, or None. No kernel needs such a rule; one that has it
        says what recorded configs it rests on."""
        del config, shape, limits
        return None

    def omissions(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return why a search leaves a config out: it cannot run, or it is certainly slow, which an exhaustive search
        does not mind; empty means that it takes part."""
        problems = self.violations(config, shape, limits)
        slow = None if problems else self.slow_reason(config, shape, limits)
        return problems if slow is None else (f"too slow, because {slow}",)

    def surely_fits(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> bool:
        """Return whether a search takes the config, and its upper bounds are within the device's memory."""
        return (
            not self.omissions(config, shape, limits)
            and self.most_shared_bytes(config, shape, limits) <= limits.shared_per_block_optin_bytes
            and self.most_tensor_memory_columns(config, shape, limits) <= limits.tensor_memory_columns
        )

    def first_fitting(
        self, candidates: Iterable[KernelConfig], shape: AttentionShape, limits: ComputeLimits
    ) -> KernelConfig:
        """Return the first candidate that surely fits, and the smallest config where none does: `unsupported` admits no
        shape that this one has no room for."""
        fitting = (config for config in candidates if self.surely_fits(config, shape, limits))
        return next(fitting, self.smallest_config())
