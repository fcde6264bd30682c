"""Tensors that travel between the ranks of a group while kernels run."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from blocktune.kernels.values.errors import RankError

Message = tuple[int, Tensor]
"""A rank of the group, and what it gets or what it sends: contiguous memory."""

ProcessGroup = Any
"""torch.distributed.ProcessGroup."""


class Messages:
    """Messages under way. All ranks of the group begin theirs in the same order.

    Args:
        group: whose ranks are meant.
        sent: what goes out; it must not change before `wait`. Nothing travels for an empty tensor.
        received: what is written.
        content: what the messages are, for the error.
        tag: keeps messages of one kind apart from those of others, where the backend knows tags.
    """

    def __init__(
        self, group: ProcessGroup, sent: Sequence[Message], received: Sequence[Message], content: str, tag: int = 0
    ) -> None:
        self._group, self._content = group, content
        sent, received = ([one for one in messages if one[1].numel()] for messages in (sent, received))
        self._peers = [rank for rank, _ in (*sent, *received)]
        self._kept = [sent, received]  # memory must not be used again while messages are under way
        operations = [self._operation(dist.isend, message, tag) for message in sent]
        operations += [self._operation(dist.irecv, message, tag) for message in received]
        try:
            self._works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._rank_error(self._peers, error) from error

    @property
    def are_under_way(self) -> bool:
        """Whether any were sent or are expected, and `wait` was not called."""
        return bool(self._works)

    def wait(self) -> None:
        """Let what is launched from now on find the messages: on a CPU, wait for them.

        Raises:
            RankError: a rank did not take part within the group's timeout.
        """
        works, self._works = self._works, []
        alone = len(works) == len(self._peers)
        for number, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._rank_error([self._peers[number]] if alone else self._peers, error) from error
        self._kept = []

    def _operation(self, way: Any, message: Message, tag: int) -> Any:
        rank, tensor = message
        return dist.P2POp(way, tensor, dist.get_global_rank(self._group, rank), group=self._group, tag=tag)

    def _rank_error(self, peers: Sequence[int], error: Exception) -> RankError:
        names = ", ".join(str(dist.get_global_rank(self._group, rank)) for rank in sorted(set(peers)))
        return RankError(
            f"All ranks of a group must make the same call, but rank {dist.get_rank()} could not exchange "
            f"{self._content} with rank {names}: {str(error).splitlines()[0]}. The other rank ended, called something "
            "else or called with other sizes: its own error says why."
        )
