"""A launch of the 8-bit forward: the pass that transposes the values, then the attention over what it wrote."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.launch import ExtrasLaunch, can_pin, launcher_of
from blocktune.kernels.hopper.fp8.transpose_values import KEYS, TURNING, transpose_values_kernel
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedLaunch:
    """launch(q, k, v, out, lse, scale[, extras]); both kernels run in the current stream.

    attend: takes the transposed values in place of v.
    sizes: the arguments of the pass that come after pointers and strides.
    """

    attend: ExtrasLaunch
    sizes: Mapping[str, Any]

    def __call__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
        turned = self.memory(v)
        self._turn(v, turned)
        self.attend(q, k, turned, out, lse, scale, extras)

    def memory(self, v: Any) -> Any:
        """Allocate memory [batch, num_heads_kv, head_dim_v, keys] for the transposed values; the allocator keeps it
        from others until this stream has used it."""
        return v.new_empty((*v.shape[:2], v.shape[3], self.sizes["tiles"] * KEYS))

    def pinned(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> Launch:
        """Pin the launch as `ExtrasLaunch.pinned` does, of both kernels."""
        turned = self.memory(v)
        compiled = self._turn(v, turned)
        attend = self.attend.pinned(q, k, turned, out, lse, scale, extras)
        if not can_pin(compiled):
            return self
        turn = launcher_of(compiled, self._grid(v), _pointers, (*v.stride()[:3], *self.sizes.values()))

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
            turned = self.memory(v)
            turn(v, turned)
            attend(q, k, turned, out, lse, scale, extras)

        launch(q, k, v, out, lse, scale, extras)
        return launch

    def _grid(self, v: Any) -> tuple[int, int, int]:
        return (self.sizes["tiles"] * v.shape[0] * v.shape[1], 1, 1)

    def _turn(self, v: Any, turned: Any) -> Any:
        return transpose_values_kernel[self._grid(v)](v, turned, *v.stride()[:3], **self.sizes, **TURNING)


def _pointers(v: Any, turned: Any) -> tuple[Any, Any]:
    return v, turned
