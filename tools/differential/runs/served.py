"""Which kernels have served calls: the dispatcher's plans count them, and its log says which did not launch."""

import logging
from collections.abc import Iterator
from typing import Any


class ServedBy:
    """Looks at the plans of `blocktune.attention`, which are few: it forgets all of them first."""

    def __init__(self) -> None:
        from blocktune.runtime.dispatch.dispatcher import attention

        attention.reload()
        self._dispatcher = attention
        self._counts: dict[int, tuple[Any, int]] = {}
        self._log = _Failures()
        logger = logging.getLogger("blocktune")
        logger.handlers[:] = [self._log]
        logger.propagate = False

    def since_last(self) -> list[str]:
        """The kernels whose plans were called since the last question, sorted; `pytorch` for PyTorch's."""
        names = set()
        for plan in self._plans():
            if plan.calls > self._counts.get(id(plan), (plan, 0))[1]:
                self._counts[id(plan)] = plan, plan.calls  # which keeps it, so that no other plan has its id
                config = plan.explanation.config
                names.add("pytorch" if config is None else str(config.kernel))
        return sorted(names) or ["pytorch"]

    def failed_launches(self) -> list[str]:
        """What the dispatcher has said since the last question about configs that did not launch."""
        said, self._log.said = self._log.said, []
        return said

    def _plans(self) -> Iterator[Any]:
        dispatcher: Any = self._dispatcher
        yield from list(dispatcher.resolver.plans.values())


class _Failures(logging.Handler):
    """Keeps the messages about failed launches."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "does not launch" in message:
            self.said.append(message)
