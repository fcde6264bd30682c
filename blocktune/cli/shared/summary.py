"""The short answer of `tune run` and `tune best`: the GPU, the shape, the config, its time, how it compares, what next.

`-v` shows the rest.
"""

from typing import TYPE_CHECKING, Any

from blocktune.cli.output.render import microseconds, say
from blocktune.cli.output.winners import Predictions, checked_us, is_default, speedup_text
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.bands import band_of, predicted_text

if TYPE_CHECKING:
    from blocktune.cli.shared.lookup import Answer
    from blocktune.db.records.records import AnyBest
    from blocktune.kernels.hardware.device import DeviceSpec

DEFAULT_WINS = "the default, which a call gets without tuning"
MORE = "`-v` shows all that is known"


def show_winner(best: "AnyBest", predicted: Predictions, assumed: str = "") -> None:
    """Print the end of a search in six lines."""
    _print(best.device, best.shape, assumed, best.config.label, _time(best), _comparison(best, predicted))


def show_short(answer: "Answer", assumed: str = "") -> None:
    """Print what a call gets in six lines."""
    config, time, compared = _answer_cells(answer)
    _print(answer.device, answer.shape, assumed, config, time, compared)


def _print(device: "DeviceSpec", shape: Any, assumed: str, config: str, time: str, compared: str) -> None:
    label = f"{getattr(shape, 'kernel', '')} {shape.label}".strip()
    lines = {
        "GPU": _gpu(device),
        "shape": "; ".join(filter(None, (label, assumed, _missing_units(device, shape)))),
        "config": config,
        "time": time,
        "compared": compared,
        "next": _next(device, shape),
    }
    say("\n".join(f"{name:9} {text}" for name, text in lines.items()))


def _missing_units(device: "DeviceSpec", shape: Any) -> str:
    """Return that the GPU has no units for the data type; empty where it has."""
    from blocktune.tuner.cost.roofline import has_units

    if not has_units(getattr(shape, "dtype", ""), device):
        return "this GPU has no units for bf16, `--dtype fp16` has"
    return ""


def _gpu(device: "DeviceSpec") -> str:
    from blocktune.kernels.hardware.device import present_devices
    from blocktune.tuner.measure.device_choice import is_present

    if is_present(device):
        return device.name
    return f"{'another one' if present_devices() else 'none'} here: this is for {device.name}"


def _time(best: "AnyBest") -> str:
    if best.time_us is None:
        time = predicted_text(best.predicted_us, best.config.kernel, best.shape, best.device)
        return f"{time}, by the cost model, not measured"
    chosen = "" if best.objective == "time" else f", chosen by {best.objective}"
    return (
        f"{microseconds(best.time_us)}, {best.origin} {best.environment.regime} on {best.created_at:%Y-%m-%d}{chosen}"
    )


def _comparison(best: "AnyBest", predicted: Predictions) -> str:
    """Return how the winner compares with what a call gets without tuning."""
    is_checked = band_of(best.config.kernel, best.shape, best.device) is not None
    if is_default(best) and (best.time_us or is_checked):
        return f"{DEFAULT_WINS}; {'nothing measured' if best.time_us else 'nothing predicted'} is faster"
    if is_default(best):
        return DEFAULT_WINS
    if best.speedup_over_default is not None:
        speed = speedup_text(best.speedup_over_default, best.speedup_low, best.speedup_high)
        return f"{speed} the speed of the default"
    default_us, time_us = (checked_us(best, config, predicted) for config in (best.default, best.config))
    if best.time_us is None and default_us and time_us:
        return f"{default_us / time_us:.2f}x the speed of the default by the cost model, not measured"
    if best.time_us is None and not is_checked:
        return "no speed over the default is claimed: the model was never compared with measurements like it"
    return "not timed next to today's default"


def _answer_cells(answer: "Answer") -> tuple[str, str, str]:
    """Return config, time and comparison of an answer."""
    from blocktune.runtime.selection.reasons import explain_candidate

    found = answer.candidate
    if found is None:
        return "PyTorch's scaled_dot_product_attention", "not known", "no kernel of ours computes this shape"
    reason = explain_candidate(found, answer.shape, device=answer.device).reason
    if answer.winner is not None:
        shipped = "; ships with blocktune" if answer.is_shipped else ""
        time, compared = f"{_time(answer.winner)}; {reason}{shipped}", _comparison(answer.winner, answer.predicted)
    else:
        time, compared = "not measured", reason
    if answer.pytorchs is None:
        return found.config.label, time, compared
    return f"PyTorch's attention; the best known of ours is {found.config.label}", time, answer.pytorchs


def _next(device: "DeviceSpec", shape: Any) -> str:
    """Return what to type next: the comparison where the GPU is here, the explanation in any case."""
    from blocktune.runtime.selection.reasons import flags_of
    from blocktune.tuner.measure.device_choice import is_present

    if not isinstance(shape, AttentionShape):
        return f"`tune explain {shape.kernel}` says why; {MORE}"
    flags = flags_of(shape, device)
    bench = f"`tune bench {flags}` compares with PyTorch, cuDNN and FlashAttention; " if is_present(device) else ""
    return f"{bench}`tune explain {flags}` says why; {MORE}"
