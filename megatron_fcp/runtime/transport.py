"""What the runtime asks of whatever moves tensors between the ranks of a context-parallel group.

The product's transport is :class:`megatron_fcp.runtime.communicator.Communicator`; tests have stricter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_fcp.plan.program import Step

Message = tuple[int, torch.Tensor]  # (peer's rank in the group, contiguous tensor)


@dataclass
class Position:
    """Where a rank is in its program; written as it goes, read when something stalls.

    Attributes
    ----------
    task : str
        Such as "forward of attention".
    digest : str
        Digest of the plan being executed.
    step, num_steps : int
        Step of the pass.
    round : str
        Such as "pull round 3"; empty between rounds.
    steps : sequence of Step
        Those of the pass, for reports; empty outside an attention.
    """

    task: str = "nothing yet"
    digest: str = ""
    step: int = 0
    num_steps: int = 0
    round: str = ""
    steps: Sequence[Step] = ()

    def enter(self, task: str, digest: str, num_steps: int, steps: Sequence[Step] = ()) -> None:
        """Begin a pass."""
        self.task, self.digest, self.num_steps, self.steps = task, digest, num_steps, steps
        self.step, self.round = 0, ""

    def __str__(self) -> str:
        parts = [self.task]
        if self.num_steps:
            parts.append(f"step {self.step + 1} of {self.num_steps}")
        if self.round:
            parts.append(self.round)
        if self.digest:
            parts.append(f"plan {self.digest[:12]}")
        return ", ".join(parts)


class Pending(Protocol):
    """A posted round. On a GPU "wait" means that the current stream waits, not the host."""

    def wait_recvs(self) -> None:
        """Return once what the round receives is there."""
        ...

    def wait(self) -> None:
        """Return once the round is through and its tensors may be changed or dropped."""
        ...


class Transport(Protocol):
    """Moves tensors between the ranks of one group; messages of a pair arrive in the order in which they are posted.

    Attributes
    ----------
    rank, size : int
        In the group.
    position : Position
        Where this rank is in its program; the runtime writes it.
    in_order : bool
        A round may send what an earlier one receives and nobody has waited for: it is carried out after that one.
    """

    rank: int
    size: int
    position: Position
    in_order: bool

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start one round: every send and receive of it together."""
        ...
