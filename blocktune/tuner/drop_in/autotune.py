"""`blocktune.autotune`: what replaces `triton.autotune`, and what `install` gives every kernel of a process.

from blocktune import autotune  # instead of: from triton import autotune

@autotune(configs=[triton.Config({"BLOCK": 1024}, num_warps=4), ...], key=["n"])
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr): ...
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from triton.runtime.autotuner import Autotuner, Config

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import jitted_function
from blocktune.runtime.autotuned.call_key import Bucket, require_names, require_sequence
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.settings import Cache, CostsOf, Settings, buckets_named, rung_named
from blocktune.runtime.autotuned.summary import tell_at_exit
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.drop_in.decide import decide
from blocktune.tuner.drop_in.inductor import hand_winners

logger = logging.getLogger("blocktune")

tell_at_exit()

MAX_SPACE = 4096
"""Configs of a space. More would take hours to compile."""

EXPAND = 64
"""Configs that `expand=True` may try in addition to the listed ones."""


class TunedAutotuner(Autotuner):  # type: ignore[misc]
    """Triton's object with another way to the winner. Libraries that look for an `Autotuner` find one."""

    def __init__(self, fn: Any, *arguments: Any, settings: Settings, **options: Any) -> None:
        super().__init__(fn, *arguments, **options)
        self.kernel = TunedKernel(self, settings, decide)
        _leave_out_none(self)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the config that serves this kind of call best."""
        return self.fn.run(*args, **kwargs, **self.kernel.options(args, kwargs))

    def explain(self, *args: Any, **kwargs: Any) -> KernelExplanation:
        """Return what serves a call with these arguments, and why. A new kind of call is tuned as at its launch."""
        return self.kernel.explain(*args, **kwargs)


def _kernel_of(tuner: Autotuner) -> TunedKernel | None:
    return tuner.kernel if isinstance(tuner, TunedAutotuner) else None


hand_winners(_kernel_of)


def autotune(
    configs: "Sequence[Config]",
    key: Sequence[str] | None = None,
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
    *,
    accept: str = Rung.OTHER_COMPILER,
    strict: bool = False,
    isolate: bool = False,
    l2: Cache = "cold",
    max_spill_bytes: int = 256,
    wait_seconds: float = 120.0,
    expand: bool | int = False,
    buckets: Mapping[str, Bucket | str] | None = None,
    costs: CostsOf | None = None,
) -> Callable[[Any], TunedAutotuner]:
    """Make a jitted function choose its config by what was measured, here or earlier, as `triton.autotune` does.

    Args:
        configs: the choices, of which the first one serves where nothing may be measured.
        key: names of the arguments whose values need a config of their own.
        prune_configs_by: as for `triton.autotune`.
        reset_to_zero: as for `triton.autotune`.
        restore_value: as for `triton.autotune`.
        pre_hook: as for `triton.autotune`.
        post_hook: as for `triton.autotune`.
        warmup: ignored, accepted for compatibility; the race decides how often a config is timed.
        rep: likewise.
        use_cuda_graph: likewise.
        do_bench: times a launch in milliseconds, instead of the race: `do_bench(launch, quantiles=...)`.
        cache_results: ignored, accepted for compatibility; results are always kept.
        accept: the last source that serves a call without measuring: `exact`, `other_driver`, `other_compiler`,
            `same_capability` or `nearest`.
        strict: a call that no accepted source serves is an error; nothing is tuned.
        isolate: candidates run in a child process, on copies of the arguments.
        l2: `cold` or `warm`, the state of the L2 cache in which a launch is timed.
        max_spill_bytes: a config whose threads spill more bytes is not measured, unless all do.
        wait_seconds: how long a process waits for another one that tunes the same call.
        expand: how many configs around the listed ones may be tried in addition; True is 64.
        buckets: groups of key values by name: a function, or `power_of_two`.
        costs: returns what a launch moves and computes by its arguments, `{"bytes": ..., "flops": ...}`; without it
            `launch_metadata` of `triton.jit` says so, or the compiled code is counted.

    Raises:
        UsageError: a config has another type, the kernel has no argument of a name, or a setting is out of range.
    """
    if key is None:
        raise UsageError(
            "`key` must name the arguments whose values need a config of their own, but none is given. Name them, or "
            "pass [] if there are none."
        )
    for what, names in (("key", key), ("reset_to_zero", reset_to_zero), ("restore_value", restore_value)):
        require_sequence(what, names)
    settings = Settings(
        accept=rung_named(accept),
        strict=strict,
        isolate=isolate,
        l2=l2,
        max_spill_bytes=max_spill_bytes,
        wait_seconds=wait_seconds,
        expand=EXPAND if expand is True else expand,
        buckets=buckets_named(buckets or {}),
        costs=costs,
    )
    del warmup, rep, use_cuda_graph

    def decorate(fn: Any) -> TunedAutotuner:
        function = jitted_function(fn)
        name = f"{function.fn.__module__}:{function.fn.__qualname__}"
        _require_configs(name, configs)
        known = _known_keys(name, key, fn.arg_names)
        named = {
            "reset_to_zero": reset_to_zero,
            "restore_value": restore_value,
            "buckets": settings.buckets,
        }
        for what, names in named.items():
            require_names(what, names or (), fn.arg_names, name)
        _require_grouped_keys(name, known, settings.buckets)
        return TunedAutotuner(
            fn,
            fn.arg_names,
            list(configs),
            known,
            reset_to_zero,
            restore_value,
            pre_hook=pre_hook,
            post_hook=post_hook,
            prune_configs_by=prune_configs_by,
            do_bench=do_bench,
            cache_results=cache_results,
            settings=settings,
        )

    return decorate


def space(**choices: Iterable[Any]) -> list[Config]:
    """Return all combinations of choices as configs: `space(BLOCK_M=(64, 128), num_warps=(4, 8))`.

    Raises:
        UsageError: a parameter has no choices, or is a single value, or there are too many combinations.
    """
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    values = {name: _choices(name, given) for name, given in choices.items()}
    count = 1
    for name, given in values.items():
        count *= len(given)
        if not given or count > MAX_SPACE:
            raise UsageError(
                f"A space must have from 1 to {MAX_SPACE} combinations, but the {len(given)} choices of `{name}` make "
                f"{count}. Name other choices, or let `expand=` search."
            )
    combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return [
        Config(
            {name: value for name, value in each.items() if name not in options},
            **{name: value for name, value in each.items() if name in options},
        )
        for each in combinations
    ]


def _choices(name: str, given: Any) -> tuple[Any, ...]:
    """Return the choices of a parameter.

    Raises:
        UsageError: it is a single value.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"`{name}` must be a sequence of choices, but got {given!r}. Write {name}=({given!r},).")
    return tuple(given)


def _require_configs(name: str, configs: Sequence[Any]) -> None:
    """Require a list of configs. An empty one stands for a config without parameters, as under Triton.

    Raises:
        UsageError: it is no list, or something else is among them.
    """
    if isinstance(configs, Config):
        raise UsageError(
            f"`configs` of {name} must be a list, but got one config, {configs}. Write [triton.Config(...)]."
        )
    wrong = next((config for config in configs if not isinstance(config, Config)), None)
    if wrong is not None:
        raise UsageError(
            f"The configs of {name} must have the type `triton.Config`, but one is {wrong!r:.200}. Write "
            '`triton.Config({"BLOCK": 1024}, num_warps=4)`, or `blocktune.space(...)`.'
        )


def _known_keys(name: str, key: Sequence[str], arg_names: Sequence[str]) -> list[str]:
    """Return the names of the key that are arguments of the kernel; others cost a warning."""
    unknown = [each for each in key if each not in arg_names]
    if unknown:
        logger.warning(
            "`key` of %s names %s, which its calls never give: its arguments are %s.",
            name,
            ", ".join(unknown),
            ", ".join(arg_names),
        )
    return [each for each in key if each in arg_names]


def _require_grouped_keys(name: str, key: Sequence[str], buckets: Mapping[str, Bucket]) -> None:
    """Require that buckets group values of the key.

    Raises:
        UsageError: a name is not in the key, so nothing would be grouped.
    """
    others = [bucket for bucket in buckets if bucket not in key]
    if others:
        raise UsageError(
            f"`buckets` of {name} names {', '.join(others)}, but its `key` is only [{', '.join(key)}]. "
            "Add the name, or leave its bucket out."
        )


def _leave_out_none(tuner: Any) -> None:
    """Let hooks of Triton's own pass over arguments that are None, as those of Triton 3.9 do."""
    if not tuner.user_defined_pre_hook and (tuner.reset_to_zero or tuner.restore_value):

        def pre_hook(named: Mapping[str, Any], reset_only: bool = False) -> None:
            for name in tuner.reset_to_zero:
                if named[name] is not None:
                    named[name].zero_()
            if not reset_only:
                kept = [name for name in tuner.restore_value if named[name] is not None]
                tuner.restore_copies = {name: named[name].clone() for name in kept}

        tuner.pre_hook = pre_hook
    if not tuner.user_defined_post_hook and tuner.restore_value:

        def post_hook(named: Mapping[str, Any], exception: Exception | None) -> None:
            del exception
            for name, value in getattr(tuner, "restore_copies", {}).items():
                named[name].copy_(value)
            tuner.restore_copies = {}

        tuner.post_hook = post_hook
