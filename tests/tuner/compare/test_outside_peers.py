"""FlexAttention says our features in its own functions, and FlashAttention-3 and -4 are called as they want to be."""

import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal, Direction
from blocktune.tuner.compare.flash_peers import FLASH_PEERS, FlashPeer
from blocktune.tuner.compare.flex_peer import flex_compute
from blocktune.tuner.correctness.checks_of_shape import questions_of

SHAPE = AttentionShape(
    batch=2, num_heads=4, num_heads_kv=2, seqlen_q=128, seqlen_k=128, head_dim=32, head_dim_v=32, dtype="float32"
)
WORDS = ("", "window=20:9", "softcap", "alibi", "boolean", "additive", "block_sparse", "window=40:-1 softcap alibi")
# uncompiled it computes all scores, which it warns about
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch 2.11 warns of its own use of it
]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def problem_of(shape: AttentionShape, make: Any) -> str | None:
    question, _ = questions_of(shape, device="cuda" if torch.cuda.is_available() else "cpu", seed=0)
    compute = make(shape, question)
    return question.problem(compute(question.q, question.k, question.v))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.few(5)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("words", WORDS)
def test_flex_computes_the_features(words: str, causal: Causal) -> None:
    shape = replace(SHAPE, features=Features.parse(words), causal=causal)
    assert problem_of(shape, flex_compute) is None


@pytest.mark.gpu
@pytest.mark.parametrize("words", ["", "boolean softcap"])
def test_flex_computes_gradients(words: str) -> None:
    """Which it does on a GPU alone."""
    shape = replace(SHAPE, features=Features.parse(words), direction=Direction.BACKWARD, dtype="bfloat16", head_dim=64)
    assert problem_of(replace(shape, head_dim_v=64), flex_compute) is None


def test_flex_is_compiled_for_more_shapes_than_pytorch_compiles_a_function_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, mode, **options: compiled(function, backend="eager", **options)
    )
    with torch._dynamo.config.patch(recompile_limit=2):
        for seqlen in (64, 80, 96, 112):
            assert problem_of(replace(SHAPE, seqlen_q=seqlen, seqlen_k=seqlen), flex_compute) is None


@pytest.mark.parametrize(("words", "masks"), [("boolean", (1, 1)), ("block_sparse", (1, 4)), ("window=20:9", (1, 1))])
def test_flex_lays_out_as_many_masks_as_there_are(
    words: str, masks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(function: Any, **options: Any) -> Any:
        def attend(*tensors: Any, **given: Any) -> Any:
            asked.append(given)
            return function(*tensors, **given)

        return attend

    monkeypatch.setattr(torch, "compile", compiled)
    assert problem_of(replace(SHAPE, features=Features.parse(words)), flex_compute) is None
    assert asked[0]["block_mask"].shape[:2] == masks


def test_flex_names_what_it_cannot_say() -> None:
    shape = replace(SHAPE, features=Features.parse("dropout"))
    with pytest.raises(UsageError, match="without dropout"):
        problem_of(shape, flex_compute)


Asked = list[dict[str, Any]]


def fake_package(monkeypatch: pytest.MonkeyPatch, module: str) -> Asked:
    """Put a package in place that computes by the definition, and return the options that it is called with."""
    asked: Asked = []

    def flash_attn_func(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, **options: Any) -> Any:
        asked.append(options)
        turned = (tensor.transpose(1, 2) for tensor in (q, k, v))
        mask = Causal.LOWER_RIGHT if causal else Causal.NONE
        out, lse = attention_reference(*turned, causal=mask, scale=softmax_scale)
        return out.transpose(1, 2), lse

    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    sys.modules[module].flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    return asked


@pytest.fixture(params=["flash_attn_interface", "fa3_fwd_interface", "flash_attn.cute"])
def peer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashPeer:
    fake_package(monkeypatch, request.param)
    return next(peer for peer in FLASH_PEERS.values() if request.param in peer.modules)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
def test_flash_attention_is_called_in_its_own_layout(peer: FlashPeer, direction: Direction, causal: Causal) -> None:
    assert problem_of(replace(SHAPE, direction=direction, causal=causal), peer.compute) is None


def options_of(shape: AttentionShape, name: str, asked: Asked) -> dict[str, Any]:
    """Return what a peer is called with, for a question of features or of none."""
    question, _ = questions_of(shape, device="cpu", seed=0)
    compute = FLASH_PEERS[name].compute(shape, question)
    compute(question.q, question.k, question.v)
    return asked[-1]


def test_features_are_said_in_the_words_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    third, fourth = (fake_package(monkeypatch, module) for module in ("fa3_fwd_interface", "flash_attn.cute"))
    window = replace(SHAPE, features=Features.parse("window=40:-1"))
    assert options_of(window, "fa3", third) == {"window_size": (40, -1)}
    assert options_of(window, "fa4", fourth) == {"window_size": (40, None)}
    capped = options_of(replace(SHAPE, features=Features.parse("softcap")), "fa3", third)
    assert capped["softcap"] > 0
    steady = replace(SHAPE, features=Features.parse("deterministic"), direction=Direction.BACKWARD)
    assert options_of(steady, "fa4", fourth) == {"deterministic": True}


def test_few_queries_let_the_third_generation_choose_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    third, fourth = (fake_package(monkeypatch, module) for module in ("fa3_fwd_interface", "flash_attn.cute"))
    shape = replace(SHAPE, seqlen_q=1)
    assert options_of(shape, "fa3", third) == {"num_splits": 0}
    assert options_of(shape, "fa4", fourth) == {}


@pytest.mark.parametrize("name", FLASH_PEERS)
def test_a_peer_that_is_not_installed_is_named(name: str) -> None:
    peer = FLASH_PEERS[name]
    with pytest.raises(UsageError, match=rf"{peer.title} cannot be imported.*Install .*{peer.packages[-1]}"):
        problem_of(SHAPE, peer.compute)
    assert peer.version is None


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != "fa3-fwd":
            raise metadata.PackageNotFoundError(package)
        return "0.0.3"

    monkeypatch.setattr(metadata, "version", version)
    assert FLASH_PEERS["fa3"].version == "fa3-fwd 0.0.3"
    assert FLASH_PEERS["fa4"].version is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": Features(alibi=True)}, "compared without alibi"),
        ({"causal": Causal.UPPER_LEFT, "seqlen_k": 256}, "aligns the causal mask to the lower right"),
        ({"dtype": FP8}, "takes no 8-bit tensors"),
    ],
)
def test_a_shape_that_a_peer_computes_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    shape = replace(SHAPE, **changes)
    with pytest.raises(UsageError, match=message):
        FLASH_PEERS["fa4"].compute(shape, None)  # type: ignore[arg-type]
