"""The first use of a config that is not exact is compared with attention; one that differs is used no more."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels import registry
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.files.findings import findings_path, stored_findings
from blocktune.kernels.files.variables import CANARY
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.feature_tensors import NO_EXTRAS
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.sdpa_arguments import SdpaArguments, plain_call
from blocktune.runtime.dispatch.torch_attention import torch_attention
from blocktune.runtime.selection import canary
from blocktune.runtime.selection.canary import problem_of
from tests.support.fakes.dispatch_fakes import ListSource, PlainKernel, config, pretend_h200, shape_like, tuned
from tests.support.fakes.dispatch_fakes import tensors as dispatch_tensors

pytestmark = pytest.mark.triton_free

CONFIG = KernelConfig("flash_fwd", 64, 64, 4, 2)


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    canary.counts.clear()
    yield
    canary.counts.clear()


def tensors(dtype: torch.dtype, *, size: float = 1.0, length: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 64, generator=generator) * size
    key, value = (torch.randn(2, 2, length, 64, generator=generator) * size for _ in range(2))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def launcher(is_causal: bool, spoil: Any = lambda out: None) -> Any:
    def launch(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: None, scale: float) -> None:
        out.copy_(torch_attention(SdpaArguments(query, key, value, None, 0.0, is_causal, scale, enable_gqa=True)))
        spoil(out)

    return launch


def shape_of(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionShape:
    call = plain_call(SdpaArguments(query, key, value, is_causal=is_causal))
    return call.shape(query, key, value, Direction.FORWARD)


def problem(given: tuple[Tensor, Tensor, Tensor], spoil: Any = lambda out: None, *, is_causal: bool = True) -> Any:
    return compared(launcher(is_causal, spoil), given, is_causal)


def compared(launch: Any, given: tuple[Tensor, Tensor, Tensor], is_causal: bool, scale: float = 0.125) -> str | None:
    out = torch.empty_like(given[0])
    call, results = (shape_of(*given, is_causal), NO_EXTRAS, scale), (*given, out, None)
    rows = canary.sampled(*call, results)
    launch(*results, scale)
    return problem_of(CONFIG, *call, results, rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_what_is_right_stays(dtype: torch.dtype, is_causal: bool, size: float) -> None:
    assert problem(tensors(dtype, size=size), is_causal=is_causal) is None
    assert canary.counts == {"compared": 1}
    assert stored_findings() == []


def one_tile_missing(out: Tensor) -> None:
    out[:, :, 64:128] = 0


def of_another_head(out: Tensor) -> None:
    out.copy_(out.roll(1, dims=1))


def a_nan(out: Tensor) -> None:
    out[-1, -1, -1, -1] = float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spoil", [one_tile_missing, of_another_head, a_nan])
def test_what_is_wrong_is_named_counted_and_stored(
    dtype: torch.dtype, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reason = problem(tensors(dtype), spoil)
    assert "differs from attention" in reason
    assert canary.counts == {"compared": 1, "wrong": 1}
    assert caplog.text.count("is not used any more") == 1
    (finding,) = stored_findings()
    assert finding.config == CONFIG
    assert finding.times_the_bound > 1
    path = findings_path()
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_wrong_mask_is_seen() -> None:
    given = tensors(torch.float16)
    assert compared(launcher(False), given, True) is not None


@pytest.mark.parametrize("scale", [0.01, 0.125, 1.0])
def test_the_scale_is_that_of_the_call(scale: float) -> None:
    given = tensors(torch.float16)
    assert compared(launcher(True), given, True, scale) is None


def with_probabilities_in(dtype: torch.dtype) -> Any:
    """A launch that rounds what follows the maximum of a row to a type, as kernels do ahead of the second product."""

    def launch(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: None, scale: float) -> None:
        scores = query.float() @ key.float().mT * scale
        parts = (scores - scores.amax(-1, keepdim=True)).exp()
        out.copy_(parts.to(dtype).float() @ value.float() / parts.sum(-1, keepdim=True))

    return launch


def rounded(distance: float, dtype: torch.dtype) -> str | None:
    """The problem of probabilities rounded to a type, where a key of no value is this far ahead of the others."""
    query, key, value = (torch.zeros(1, 1, 200, 64, dtype=torch.float16) for _ in range(3))
    query[..., 0] = key[:, :, 0, 0] = (distance * 8.0) ** 0.5
    value[:, :, 1:] = torch.randn(199, 64).half()
    return compared(with_probabilities_in(dtype), (query, key, value), False)


@pytest.mark.parametrize("distance", [8.0, 12.0, 16.2])
def test_a_key_of_no_value_that_takes_nearly_all_probability_leaves_the_others_coarse(distance: float) -> None:
    """In float16 the probabilities of the others are subnormal numbers, or 0."""
    assert rounded(distance, torch.float16) is None


def test_what_is_too_coarse_is_seen_next_to_such_a_key() -> None:
    assert rounded(8.0, torch.float8_e5m2) is not None


def test_values_that_are_not_finite_are_not_compared() -> None:
    query, key, value = tensors(torch.float16)
    value[:, :, 5] = float("inf")
    assert problem((query, key, value)) is None


@pytest.mark.parametrize("word", ["0", "off", "OFF"])
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv(CANARY.name, word)
    assert problem(tensors(torch.float16), one_tile_missing) is None
    assert canary.counts == {}


def test_no_memory_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(canary, "samples", full)
    assert problem(tensors(torch.float16), one_tile_missing) is None
    assert stored_findings() == []


def test_a_place_that_cannot_be_written_and_damaged_lines_cost_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert problem(tensors(torch.float16), one_tile_missing) is not None
    path = findings_path()
    assert path is not None
    path.write_bytes(b'{"torn\n' + path.read_bytes() + b"[1]\n")
    assert len(stored_findings()) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert problem(tensors(torch.float16), one_tile_missing) is not None
    assert stored_findings() == []


class LyingKernel(PlainKernel):
    """A kernel that is wrong with some configs."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[KernelConfig] = set()

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        honest = super().bind(config, shape)

        def launch(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Any, scale: float) -> None:
            honest(query, key, value, out, lse, scale)
            if config in self.wrong:
                one_tile_missing(out)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> LyingKernel:
    pretend_h200(monkeypatch)
    lying = LyingKernel()
    monkeypatch.setattr(registry, "KERNELS", {lying.name: lying})
    return lying


def test_a_borrowed_config_that_is_wrong_is_passed_over_for_good(kernel: LyingKernel) -> None:
    shape, wrong = shape_like(128), config()
    kernel.wrong = {wrong}
    dispatcher = Dispatcher(ListSource([tuned(shape, wrong, Origin.BORROWED)]))
    given = dispatch_tensors(shape)
    torch.testing.assert_close(dispatcher(*given), torch_attention(SdpaArguments(*given)))
    explanation = dispatcher.explain(*given)
    assert explanation.config != wrong
    assert any("differs from attention" in str(rejection) for rejection in explanation.passed_over)
    launches = len(kernel.launched)
    dispatcher(*given)
    assert len(kernel.launched) == launches + 1  # a later call pays nothing
    longer = dispatch_tensors(shape_like(256))
    torch.testing.assert_close(dispatcher(*longer), torch_attention(SdpaArguments(*longer)))
    assert kernel.launched.count(wrong) == 1  # and compared once


def test_an_exact_config_is_not_compared(kernel: LyingKernel) -> None:
    shape = shape_like(128)
    Dispatcher(ListSource([tuned(shape, config())]))(*dispatch_tensors(shape))
    assert canary.counts == {}
    Dispatcher(ListSource([tuned(shape, config(), Origin.BORROWED)]))(*dispatch_tensors(shape))
    assert canary.counts == {"compared": 1}
