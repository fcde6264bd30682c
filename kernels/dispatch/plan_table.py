"""Plans by key, and the short way to the two that were looked up last.

The layers of a model call with tensors of equal kind, one after the other. A key asks each of them for size, strides,
data type and so on, and is hashed: most of 2 us. The guards that PyTorch puts around compiled graphs ask all of it of
three tensors in one call.
"""

from typing import Any

from torch import Tensor, float32, is_grad_enabled

from blocktune.kernels.base.precision import allows_tf32
from blocktune.kernels.dispatch.guards import Guard, guard_of, is_watched, never, while_unchanged
from blocktune.kernels.dispatch.plan import Plan, plan_key
from blocktune.kernels.dispatch.torch_attention import ALIGNMENT_BYTES

Way = tuple[Guard, bool, bool, Plan | None]
"""The short way to a plan: for tensors that the guard lets through, with these options (is_causal, enable_gqa)."""

_NO_WAY: Way = (never, False, False, None)


class PlanTable(dict[Any, Plan]):
    """Plans by `plan_key`."""

    __slots__ = ("_recent", "_ways")

    def __init__(self) -> None:
        self._recent: tuple[Way, Way] = (_NO_WAY, _NO_WAY)
        self._ways: dict[Any, Way] = {}  # by key

    def clear(self) -> None:
        super().clear()
        self._recent, self._ways = (_NO_WAY, _NO_WAY), {}

    def of(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> Plan | None:
        """Return the plan of a call about which nothing but its key decides.

        None where there is no plan, or where something else decides: `call_obstacle` makes the same checks and gives
        reasons.
        """
        if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor or is_watched():
            return None
        if query.is_nested or key.is_nested or value.is_nested:
            return None  # before the guard: nested tensors without strides would end the process there
        try:
            is_aligned = not (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT_BYTES
        except RuntimeError:
            return None  # sparse tensors have no memory to point to
        recent = self._recent
        if is_aligned:
            for guard, causal, gqa, plan in recent:
                if causal is is_causal and gqa is enable_gqa and guard(query, key, value):
                    return plan
        if is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return None
        place = plan_key(query, key, value, is_causal, enable_gqa)
        way = self._ways.get(place)
        if way is None or (way in recent and way[0] is not never):  # has just failed: inference mode is part of it
            way = self._new_way(place, query, key, value, is_causal, enable_gqa)
        if way is _NO_WAY or way[1] is not is_causal or way[2] is not enable_gqa:
            return None  # 1 equals True, so that both have one key, but PyTorch refuses it
        self._recent = way, recent[0]
        return way[3]

    def _new_way(self, place: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> Way:
        plan = self.get(place)
        if plan is None or not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool)):
            return _NO_WAY
        addresses = {query.data_ptr(), key.data_ptr(), value.data_ptr()}
        is_short = (
            not (query.requires_grad or key.requires_grad or value.requires_grad)  # they may be recorded next time
            and len(addresses) == 3
            and not any(address % ALIGNMENT_BYTES for address in addresses)
        )
        guard = guard_of(query, key, value) if is_short else never
        if query.dtype is float32 and guard is not never:
            guard = while_unchanged(guard, allows_tf32)  # with another precision go other plans
        way: Way = guard, is_causal, enable_gqa, plan
        self._ways[place] = way
        return way
