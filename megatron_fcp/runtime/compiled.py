"""A rank's plan with what its kernels need on the device, built once per plan and used by every layer."""

from __future__ import annotations

import torch

from megatron_fcp.plan.rank_plan import RankPlan
from megatron_fcp.runtime.kernels.base import WorkList


class CompiledPlan:
    """A :class:`RankPlan` ready to run on ``device``.

    Building it is the only place where index arrays go to the device, so a layer never waits for the host.

    Attributes
    ----------
    rank_plan : RankPlan
    device : torch.device
    work : tuple of WorkList
        One per stage; stage 0 is local.
    parts : tuple of tuple of tuple of WorkList
        What backward attends to in each part of each stage, as one or two kernel calls.
    """

    def __init__(self, rank_plan: RankPlan, device: torch.device | str = "cpu") -> None:
        self.rank_plan = rank_plan
        self.device = torch.device(device)
        self.work = tuple(WorkList.from_stage(stage, self.device) for stage in rank_plan.stages)
        lists = {id(stage): work for stage, work in zip(rank_plan.stages, self.work)}
        self.parts = tuple(
            tuple(tuple(lists.get(id(w)) or WorkList.from_stage(w, self.device) for w in part) for part in stage)
            for stage in rank_plan.parts
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the rank, padding included."""
        return self.rank_plan.num_tokens

    def buffer_tokens(self, buffer: int) -> int:
        """Tokens that buffer ``buffer`` holds (0: the rank's own)."""
        return self.rank_plan.stages[buffer].kv_tokens
