"""The warm-up of a serving engine: rank 0 tunes autotuned kernels, all ranks take its winners, and nothing is measured
any more."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from blocktune.kernels.values.errors import RankError
from blocktune.runtime.api.rank_sync import ProcessGroup, error_text, gather_answers, sync_configs
from blocktune.runtime.autotuned.settings import Measuring, measuring, set_measuring


def tune_at_warmup(run: Callable[[], object], *, group: ProcessGroup = None) -> None:
    """Run a warm-up on all ranks of a group together, let rank 0 tune, and let all take what it knows then.

    While it runs, the first rank measures what is new to it; the others launch what they know, or the first config of a
    list. Functions of `torch.compile` run uncompiled, so that Inductor gets the winners later. From then on, no kind of
    call is measured in this process: one that the warm-up did not make gets the nearest known config, or the first of
    its list, and a warning says so. Call it before graphs are captured, and again after a model has changed.

    Args:
        run: launches every kind of call that will be served, with the sizes that are common.
        group: the ranks, all of which must call this; the default group unless given. A process without
            torch.distributed is alone.

    Raises:
        RankError: the warm-up of another rank failed.
        UsageError: ranks have different devices, kernels or compilers.
        Exception: what `run` raises.
    """
    together = dist.is_available() and dist.is_initialized()
    is_first = not together or dist.get_rank(group) == 0
    before, failure = measuring(), None
    set_measuring(Measuring.ON if is_first else Measuring.BY_RANK_0)
    try:
        with torch.compiler.set_stance("force_eager"):
            run()
    except Exception as error:  # which the other ranks wait for
        failure = error
    finally:
        set_measuring(before)
    if together:
        _require_success(failure, group)
        sync_configs(group)
    elif failure is not None:
        raise failure
    set_measuring(Measuring.OFF)


def _require_success(failure: Exception | None, group: ProcessGroup) -> None:
    """Require that the warm-ups of all ranks came to their end.

    Raises:
        Exception: this rank's failure.
        RankError: that of another rank.
    """
    try:
        told = gather_answers({"problem": "" if failure is None else error_text(failure)}, group)
    finally:  # an error of CUDA ends the gathering as well
        if failure is not None:
            raise failure
    problems = [f"rank {rank}: {answer['problem']}" for rank, answer in enumerate(told) if answer["problem"]]
    if problems:
        raise RankError(
            f"The warm-up must succeed on all ranks, but failed on {'; '.join(problems)}. Correct it there."
        )
