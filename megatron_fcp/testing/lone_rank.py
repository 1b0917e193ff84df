"""One rank of a context-parallel group without the others: for what a rank works out alone from its batch.

Call :func:`begin_alone` in a process of its own (:meth:`megatron_fcp.testing.loop.TrainingLoop.call`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_fcp.integration import session
from megatron_fcp.integration.settings import Settings


@dataclass(frozen=True)
class LoneGroup:
    """Knows its place in a group of which no other rank exists."""

    of_rank: int
    of_size: int

    def rank(self) -> int:
        """Rank in the group."""
        return self.of_rank

    def size(self) -> int:
        """Ranks of the group."""
        return self.of_size


class _Agreeable:
    """A communicator whose ranks agree about everything, and that cannot do anything else."""

    def agree(self, *args: Any) -> None:
        """Compare nothing."""


def begin_alone(settings: Settings, rank: int) -> LoneGroup:
    """Begin the session of ``rank`` among ``settings.cp_size``, and return its context-parallel group.

    Parameters
    ----------
    settings : Settings
    rank : int
    """
    group = LoneGroup(rank, settings.cp_size)
    run = session.begin(settings)
    run.attention_layers = 1
    run.communicator = lambda cp_group: _Agreeable()  # type: ignore[method-assign,assignment,return-value]
    session.cp_group = lambda: group
    return group
