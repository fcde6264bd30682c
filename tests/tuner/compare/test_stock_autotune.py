"""Stock autotune over our kernels: every config computes the right result with the blocks that it names.

Triton's interpreter runs the kernels, which a process either has or has not, hence a process of its own.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import Future

import pytest
import torch

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import competing, get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.compare.stock_autotune import run_stock_autotune
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.correctness.forward import make_questions, softmax_scale

SHAPE = AttentionShape(
    batch=1,
    num_heads=2,
    num_heads_kv=1,
    seqlen_q=70,
    seqlen_k=96,
    head_dim=32,
    head_dim_v=32,
    dtype="float32",
    causal=Causal.UPPER_LEFT,
)


def some_configs() -> list[KernelConfig]:
    """Of each kernel every block_n, so that ragged and whole tiles and different descriptors take part."""
    space = SearchSpace.build(SHAPE, device_named("h200").limits, competing())
    return [
        config
        for config in space.feasible
        if config.block_m in (64, 128) and (config.num_warps, config.num_stages) == (4, 1)
    ]


class Compiler:
    """Says that everything compiles in two seconds, except the first config."""

    def __init__(self) -> None:
        self.asked = 0

    def submit(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[CompileResult]":
        self.asked += 1
        outcome = Outcome.COMPILE_ERROR if self.asked == 1 else Outcome.OK
        future: Future[CompileResult] = Future()
        future.set_result(CompileResult(config=config, outcome=outcome, error="", seconds=2.0))
        return future


def main() -> None:
    """Tunes in this process; the fourth config to run fails and the last but one is the fastest."""
    question, _ = make_questions(SHAPE, device="cpu", seed=0)
    out = torch.empty(1, 2, SHAPE.seqlen_q, SHAPE.head_dim_v)
    configs, problems = some_configs(), []

    def do_bench(call, quantiles):
        out.fill_(float("nan"))
        call()
        problems.append(question.problem(out))
        if len(problems) == 4:
            raise RuntimeError("planted")
        return [0.5 if len(problems) == len(configs) - 2 else 1.0] * len(quantiles)

    tuning = run_stock_autotune(
        configs,
        SHAPE,
        (9, 0),
        compiler=Compiler(),
        bind=lambda config, shape: get_kernel(config.kernel).bind(config, shape),
        arguments=(question.q, question.k, question.v, out, None, softmax_scale(SHAPE)),
        synchronize=lambda: None,
        do_bench=do_bench,
    )
    print(json.dumps(tuning.to_json() | {"problems": problems, "final": question.problem(out)}))


@pytest.mark.exhaustive
def test_every_config_of_every_kernel_is_tried_and_right() -> None:
    configs = some_configs()
    assert {config.kernel for config in configs} == {
        kernel.name for kernel in kernels_for(SHAPE, device_named("h200").limits)
    }
    assert len({config.block_n for config in configs}) > 1
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-P", __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["problems"] == [None] * (len(configs) - 1)
    assert told["final"] is None
    assert (told["configs"], told["left_out"], told["failed"]) == (len(configs) - 1, 1, 1)
    assert told["winner"] == configs[-2].to_json()
    assert told["time_us"] == 500.0
    assert told["compile_seconds"] == 2.0 * (len(configs) - 1)
    assert told["cold_seconds"] > told["compile_seconds"]


if __name__ == "__main__":
    main()
