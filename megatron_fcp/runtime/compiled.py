"""A rank's plan with what its kernels need on the device, built once per plan and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fcp.plan.rank_plan import RankPlan
from megatron_fcp.runtime.kernels.base import WorkList

_ALIGNMENT = 256  # bytes; what a device's allocator gives, and kernels may count on


class CompiledPlan:
    """A :class:`RankPlan` ready to run on ``device``.

    Building it is the only place where index arrays go to the device, so a layer never waits for the host.

    Attributes
    ----------
    rank_plan : RankPlan
    device : torch.device
    calls : tuple of tuple of WorkList
        What forward attends to in each stage, as one kernel call, or with a window up to three; stage 0 is local.
    parts : tuple of tuple of tuple of WorkList
        What backward attends to in each part of each stage, as one, two or three kernel calls.
    """

    def __init__(self, rank_plan: RankPlan, device: torch.device | str = "cpu") -> None:
        self.rank_plan = rank_plan
        self.device = torch.device(device)
        self.calls = tuple(tuple(WorkList.from_stage(w, self.device) for w in stage) for stage in rank_plan.calls)
        lists = {id(w): work for s, works in zip(rank_plan.calls, self.calls) for w, work in zip(s, works)}
        self.parts = tuple(
            tuple(tuple(lists.get(id(w)) or WorkList.from_stage(w, self.device) for w in part) for part in stage)
            for stage in rank_plan.parts
        )

    def to(self, device: torch.device | str) -> CompiledPlan:
        """This plan on another device; its index arrays go there in one copy."""
        every = (*(w for s in self.calls for w in s), *(w for s in self.parts for p in s for w in p))
        lists = list({id(w): w for w in every}.values())
        moved_lists = iter(upload([t for work in lists for t in work.tensors()], device))
        moved = {id(work): work.with_tensors(moved_lists) for work in lists}
        other = object.__new__(CompiledPlan)
        other.rank_plan, other.device = self.rank_plan, torch.device(device)
        other.calls = tuple(tuple(moved[id(w)] for w in stage) for stage in self.calls)
        other.parts = tuple(tuple(tuple(moved[id(w)] for w in part) for part in stage) for stage in self.parts)
        return other

    @property
    def num_tokens(self) -> int:
        """Tokens of the rank, padding included."""
        return self.rank_plan.num_tokens

    def buffer_tokens(self, buffer: int) -> int:
        """Tokens that buffer ``buffer`` holds (0: the rank's own)."""
        return self.rank_plan.stages[buffer].kv_tokens


def upload(tensors: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """Copies of one-dimensional host tensors on ``device``, sent together: a copy of a small one costs its latency.

    Neither the host nor the device's other streams wait for it where the device is a GPU.
    """
    device = torch.device(device)
    sizes = [t.numel() * t.element_size() for t in tensors]
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    staging = torch.empty(places[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for t, at, size in zip(tensors, places, sizes):
        staging[at : at + size] = t.contiguous().view(torch.uint8)
    there = staging.to(device, non_blocking=True)
    return [there[at : at + size].view(t.dtype) for t, at, size in zip(tensors, places, sizes)]
