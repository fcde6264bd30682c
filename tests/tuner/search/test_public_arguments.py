"""Arguments of the wrong type: a public function names the argument, shows what it got, and says the way out."""

from collections.abc import Callable
from typing import Any

import optuna
import pytest
import torch

import blocktune
from blocktune import AttentionShape, Features, UsageError
from blocktune.kernels.hardware.device import device_named

SHAPE = AttentionShape(batch=1, num_heads=2, seqlen_q=16, head_dim=32)
QUERY = torch.zeros(1, 2, 16, 32)
CACHE = torch.zeros(1, 64, 2, 32)
WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "shape.features": ("features", lambda: AttentionShape(batch=1, num_heads=1, seqlen_q=1, head_dim=8, features=5)),
    "features.window": ("window", lambda: Features(window=5)),
    "features.softcap": ("softcap", lambda: Features(softcap=30.0)),
    "budget.seconds": ("time budget", lambda: blocktune.Budget(seconds="60")),
    "tune.shape": ("shape", lambda: blocktune.tune("s8192", device="h200")),
    "tune.device": ("device", lambda: blocktune.tune(SHAPE, device=200)),
    "tune.budget": ("budget", lambda: blocktune.tune(SHAPE, device="h200", budget=60)),
    "tune.kernels": ("kernels", lambda: blocktune.tune(SHAPE, device="h200", kernels=["flash_fwd"])),
    "best_config.shape": ("shape", lambda: blocktune.best_config("s8192", device="h200")),
    "best_config.device": ("device", lambda: blocktune.best_config(SHAPE, device=200)),
    "explain.shape": ("shape", lambda: blocktune.explain("s8192", device="h200")),
    "explain.config": ("config", lambda: blocktune.explain(SHAPE, "flash_fwd", device="h200")),
    "occupancy.cc": ("cc", lambda: occupancy(cc=9.0)),
    "occupancy.num_warps": ("num_warps", lambda: occupancy(num_warps="4")),
    "occupancy.registers": ("registers", lambda: occupancy(registers=64.5)),
    "occupancy.carveout": ("carve-out", lambda: occupancy(carveout_percent="half")),
    "warmup.shapes": ("shape", lambda: blocktune.attention.warmup(["s8192"])),
    "sampler.prior": ("prior", lambda: blocktune.GuidedSampler(5)),
    "flash.alibi_slopes": ("alibi_slopes", lambda: blocktune.flash_attn_func(*[CACHE] * 3, alibi_slopes=[1.0, 0.5])),
    "fp8.scale": ("scale_q", lambda: blocktune.attention_fp8(*[QUERY.to(torch.float8_e4m3fn)] * 3, scale_q=1.5)),
    "merge.lse": ("lse_b", lambda: blocktune.merge_partial(CACHE, torch.zeros(1, 2, 64), CACHE, None)),
    "tree.mask": ("tree_mask", lambda: blocktune.tree_attention(QUERY, CACHE, CACHE, [[1]], torch.tensor([16]))),
    "sparse.query": ("query", lambda: blocktune.block_sparse_attention(None, QUERY, QUERY, block_mask())),
}


def occupancy(**given: Any) -> object:
    return blocktune.occupancy(**{"num_warps": 4, "registers": 64, "shared_bytes": 0, "cc": "9.0"} | given)


def block_mask() -> blocktune.BlockMask:
    return blocktune.BlockMask(16, 16, torch.ones(1, 1, 1, 1, dtype=torch.bool))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_type_is_named_with_its_value(case: str) -> None:
    name, call = WRONG[case]
    with pytest.raises(UsageError, match=rf"`?{name}`?.* must .*but got .+"):
        call()


def test_a_prior_that_is_no_number_is_refused() -> None:
    space = {"x": optuna.distributions.IntDistribution(1, 4)}
    study = optuna.create_study(sampler=blocktune.GuidedSampler(lambda point: None, search_space=space))
    with pytest.raises(UsageError, match=r"must be positive.*got None"):
        study.ask().suggest_int("x", 1, 4)


def test_a_device_may_be_given_as_itself() -> None:
    device = blocktune.best_config(SHAPE, device="h200")
    assert blocktune.best_config(SHAPE, device=device_named("h200")) == device
