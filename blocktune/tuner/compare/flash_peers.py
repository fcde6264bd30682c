"""FlashAttention-3 and -4 as contenders, where they are installed.

    compute = FLASH_PEERS["fa3"].compute(shape, question)

Both take [batch, length, heads, dim] and align the causal mask and windows to the lower right. What such a package was
built without, it says itself when it is called.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal
from blocktune.tuner.compare.peers import Compute, for_question
from blocktune.tuner.compare.report import FEW_QUERIES
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion
from blocktune.tuner.correctness.forward import softmax_scale

KNOWN_FEATURES = frozenset({"window", "softcap", "deterministic"})

OWN_SPLITS = 0
"""The number of splits by which FlashAttention-3 chooses one itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashPeer:
    """One generation of FlashAttention.

    title: its name in tables. modules: where its `flash_attn_func` may be, the fullest package first. packages: the
    distributions that hold them. unlimited: how it says that a window has no bound on a side. chooses_splits: whether
    it can choose a number of splits for few queries itself. takes_fp8: whether it computes 8-bit tensors.
    """

    title: str
    modules: tuple[str, ...]
    packages: tuple[str, ...]
    unlimited: int | None
    chooses_splits: bool
    takes_fp8: bool

    def compute(self, shape: AttentionShape, question: AnyQuestion) -> Compute:
        """Return the launch of a forward, or of a backward whose forward ran before.

        Raises:
            UsageError: it is not installed, or does not compute what the shape asks for.
        """
        self._require(shape)
        return for_question(self._attend(shape, question), question)

    @property
    def version(self) -> str | None:
        """The installed version; None without one."""
        for package in self.packages:
            try:
                return f"{package} {metadata.version(package)}"
            except metadata.PackageNotFoundError:
                continue
        return None

    def _require(self, shape: AttentionShape) -> None:
        unknown = sorted(shape.features.names - KNOWN_FEATURES)
        if unknown:
            raise UsageError(f"{self.title} is compared without {', '.join(unknown)}. Compare a shape without them.")
        if shape.causal is Causal.UPPER_LEFT and shape.seqlen_q != shape.seqlen_k:
            raise UsageError(
                f"{self.title} aligns the causal mask to the lower right, but the shape is {shape.label}. "
                "Compare equal lengths."
            )
        if shape.dtype == FP8 and not self.takes_fp8:
            raise UsageError(f"{self.title} takes no 8-bit tensors here. Compare another data type.")

    def _attend(self, shape: AttentionShape, question: AnyQuestion) -> Compute:
        function = self._function()
        options = self._options(shape, getattr(getattr(question, "inputs", None), "extras", NO_EXTRAS))

        def attend(q: Any, k: Any, v: Any) -> Any:
            turned = (tensor.transpose(1, 2) for tensor in (q, k, v))
            found = function(*turned, **options)
            return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

        return attend

    def _function(self) -> Callable[..., Any]:
        problems = []
        for module in self.modules:
            try:
                return importlib.import_module(module).flash_attn_func  # type: ignore[no-any-return]
            except ImportError as error:
                problems.append(f"{module}: {error}")
        raise UsageError(
            f"{self.title} cannot be imported: {'; '.join(problems)}. Install {' or '.join(self.packages)} to compare "
            "with it."
        ) from None

    def _options(self, shape: AttentionShape, extras: Extras) -> dict[str, Any]:
        options: dict[str, Any] = {"softmax_scale": softmax_scale(shape), "causal": shape.causal is not Causal.NONE}
        features = shape.features
        if features.window is not None:
            options["window_size"] = tuple(self.unlimited if side == UNLIMITED else side for side in features.window)
        if features.softcap:
            options["softcap"] = extras.softcap
        if features.deterministic:
            options["deterministic"] = True
        if self.chooses_splits and shape.seqlen_q <= FEW_QUERIES:
            options["num_splits"] = OWN_SPLITS
        return options


FLASH_PEERS = {
    "fa3": FlashPeer(
        title="FlashAttention-3",
        modules=("flash_attn_interface", "fa3_fwd_interface"),
        packages=("flash-attn-3", "fa3-fwd"),
        unlimited=-1,
        chooses_splits=True,
        takes_fp8=True,
    ),
    "fa4": FlashPeer(
        title="FlashAttention-4",
        modules=("flash_attn.cute",),
        packages=("flash-attn-4",),
        unlimited=None,
        chooses_splits=False,
        takes_fp8=False,
    ),
}
"""By the name of the contender."""
