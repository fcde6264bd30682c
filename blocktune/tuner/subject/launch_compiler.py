"""Compiles a call's configs in the background: `LaunchCompiler`."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from blocktune.db.records.records import Outcome
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.compile.answers import Compiled, failed_answer
from blocktune.tuner.compile.compiler import CompileResult, resources_of
from blocktune.tuner.compile_server.compile_ahead import CompileAhead
from blocktune.tuner.offline.specialization import is_importable, specialization_of


class LaunchCompiler:
    """Compiles configs of a call for the GPU that is here; see `PreparingConfigCompiler`. A context manager.

    Args:
        call: the call.
        cc: compute capability of the GPU.
        ahead: what compiles; it stays for later calls.
    """

    def __init__(self, call: AutotunedCall, cc: tuple[int, int], ahead: CompileAhead) -> None:
        self._call, self._cc, self._ahead = call, cc, ahead
        self._threads = ThreadPoolExecutor(ahead.workers, "blocktune-compile")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def start(self) -> None:
        """Let another process import the kernel's library, where it can."""
        if is_importable(self._call):
            self._ahead.start(self._call.name)

    def submit(self, config: LaunchConfig) -> "Future[CompileResult[LaunchConfig]]":
        """Compile a config. Triton says in this thread what it would compile, since a hook of the config may have to
        set the blocks of tensor descriptors before."""
        call = self._call
        specialization = specialization_of(call, config, self._cc)
        if specialization is None:
            done: Future[CompileResult[LaunchConfig]] = Future()
            done.set_result(_result(config, _code_here(call, config)))
            return done
        wait = self._ahead.begin(call.name, specialization, self._cc)
        return self._threads.submit(lambda: _result(config, wait()))

    def submit_confirmation(self, config: LaunchConfig) -> None:
        """Do nothing: the check of a winner launches what was timed."""


def _result(config: LaunchConfig, compiled: Compiled) -> CompileResult[LaunchConfig]:
    return CompileResult(
        config=config,
        outcome=compiled.outcome,
        resources=compiled.resources,
        error=compiled.error,
        seconds=compiled.seconds,
        transient=compiled.transient,
    )


def _code_here(call: AutotunedCall, config: LaunchConfig) -> Compiled:
    """Return what this process has compiled of a config before, or compiles since Triton cannot describe it."""
    try:
        found = call.tuner.fn.run(*call.args, **{**call.kwargs, **call.launched(config).all_kwargs(), "warmup": True})
    except Exception as error:  # compilers raise what they like
        return Compiled.of_answer(failed_answer(error) | {"seconds": 0.0})
    return Compiled(outcome=Outcome.OK, resources=resources_of(found))
