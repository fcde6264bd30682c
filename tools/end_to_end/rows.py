"""The rows of the table: a model, how its steps are launched, and what a step takes with each attention."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.dispatch.dispatcher import attention
from tools.end_to_end.caches import OurCache, SdpaCache
from tools.end_to_end.gpt import Attend, GptSizes, Training
from tools.end_to_end.llama import CacheAttention, Decoder, LlamaSizes
from tools.end_to_end.turns import Run, Timed, in_turns

OURS, SDPA, CUDNN = "blocktune", "sdpa", "cudnn"
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of the difference between two attentions' results, as norms over the result's."""

STEPS_COMPARED = 3
WARM_UPS = 3

Backend = Callable[[], AbstractContextManager[object]]


class DisagreementError(Exception):
    """Two attentions gave a model different results: their times mean nothing."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Where and how long is measured."""

    device: torch.device
    dtype: torch.dtype
    rounds: int
    steps: int

    @property
    def backends(self) -> dict[str, Backend]:
        """What PyTorch's function is called under, by the name of the peer."""
        if self.device.type != "cuda":
            return {SDPA: nullcontext}
        return {SDPA: nullcontext, CUDNN: lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)}


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of a model. refused: why a peer has no times."""

    model: str
    mode: str
    sizes: dict[str, int]
    timed: Timed
    refused: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        times = {name: asdict(spread) for name, spread in self.timed.step_us.items()}
        ratios = {name: asdict(spread) for name, spread in self.timed.ratios.items()}
        described = {"model": self.model, "mode": self.mode, "sizes": self.sizes, "refused": self.refused}
        return described | {"step_us": times, "ratios": ratios}


def rows(lab: Lab, gpt: GptSizes, llama: LlamaSizes) -> Iterator[Row]:
    """Yield all rows, those of graphs only where there are graphs."""
    yield training(lab, gpt)
    yield decoding(lab, llama, as_graph=False)
    if lab.device.type == "cuda":
        yield decoding(lab, llama, as_graph=True)


def training(lab: Lab, sizes: GptSizes) -> Row:
    """Return the row of a training step, launched by PyTorch operation by operation."""
    model = Training(sizes, lab.device, lab.dtype)
    loops = {OURS: TrainLoop(model, attention, nullcontext)}
    for name, backend in lab.backends.items():
        loops[name] = TrainLoop(model, scaled_dot_product_attention, backend)
    refused = _compare_results(loops, lambda name: loops[name].gradients(), lab)
    runs = {name: Run(lambda: None, loop.step) for name, loop in loops.items() if name not in refused}
    return Row("GPT-2, training", "eager", asdict(sizes), in_turns(runs, lab.device, lab.rounds, lab.steps), refused)


def decoding(lab: Lab, sizes: LlamaSizes, *, as_graph: bool) -> Row:
    """Return the row of a decoding step, launched operation by operation or as one captured graph."""
    model = Decoder(sizes, lab.device, lab.dtype)
    caches: dict[str, CacheAttention] = {OURS: OurCache(sizes, lab.device, lab.dtype)}
    for name in lab.backends:
        caches[name] = SdpaCache(sizes, lab.device, lab.dtype, sliced=not as_graph)
    backends = {OURS: nullcontext} | lab.backends
    loops = {name: DecodeLoop(model, cache, sizes.filled, backends[name]) for name, cache in caches.items()}
    refused = _compare_results(loops, lambda name: loops[name].first_logits(), lab)
    runs = {
        name: Run(loop.begin, capture_step(loop) if as_graph else loop.step)
        for name, loop in loops.items()
        if name not in refused
    }
    timed = in_turns(runs, lab.device, lab.rounds, lab.steps)
    return Row("Llama, decoding", "CUDA graph" if as_graph else "eager", asdict(sizes), timed, refused)


class TrainLoop:
    """Steps of one model in training with one attention."""

    def __init__(self, model: Training, function: Callable[..., Tensor], backend: Backend) -> None:
        self._model, self._backend = model, backend
        self._attend: Attend = lambda query, key, value: function(query, key, value, is_causal=True)

    def gradients(self) -> list[Tensor]:
        """Return the loss and some gradients, without a step."""
        with self._backend():
            return self._model.gradients(self._attend)

    def step(self) -> None:
        """Take one step."""
        with self._backend():  # once a step: entering it for each layer would count against the peer
            self._model.step(self._attend)


class DecodeLoop:
    """Steps of one decoder over one cache, from where the prompt ends."""

    def __init__(self, model: Decoder, cache: CacheAttention, filled: int, backend: Backend) -> None:
        self._model, self._cache, self._filled, self._backend = model, cache, filled, backend
        device = model.head.weight.device
        self._token = torch.ones(1, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Go back to the end of the prompt."""
        self._cache.begin(self._filled)
        self._position.fill_(self._filled)

    def step(self) -> Tensor:
        """Return the logits of the next token, which is always the same: no logits are waited for."""
        with self._backend():
            return self._model.step(self._token, self._position, self._cache)

    def first_logits(self) -> list[Tensor]:
        """Return the logits of the first steps."""
        self.begin()
        return [self.step() for _ in range(STEPS_COMPARED)]


def capture_step(loop: DecodeLoop) -> Callable[[], None]:
    """Return the replay of a step, captured once; it goes on from wherever the loop is."""
    loop.begin()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            loop.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.step()
    return graph.replay


def _compare_results(names: Iterable[str], results: Callable[[str], list[Tensor]], lab: Lab) -> dict[str, str]:
    """Compare every attention's results with those of PyTorch's own choice.

    Returns:
        why an attention other than ours gave none, by its name.

    Raises:
        DisagreementError: two results differ by more than the bound of the type.
    """
    expected = results(SDPA)
    refused: dict[str, str] = {}
    for name in names:
        try:
            found = results(name)
        except RuntimeError as error:
            if name == OURS:
                raise
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        worst = max(_difference(one, other) for one, other in zip(found, expected, strict=True))
        if not worst <= BOUNDS[lab.dtype]:
            raise DisagreementError(f"{name} differs from {SDPA} by {worst:.2e}, at most {BOUNDS[lab.dtype]} expected")
    return refused


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected."""
    size = expected.float().norm()
    return float((found.float() - expected.float()).norm() / size.clamp_min(1e-12))
