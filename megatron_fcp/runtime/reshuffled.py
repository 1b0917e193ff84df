"""Attention in the reshuffle layout: tokens move in and home while other heads are attended to.

::

    messages   in 0 | in 1 | KV of 0 | in 2 | KV of 1, home 0 | in 3 | KV of 2, home 1 | ...
    kernels                | attend to 0    | attend to 1            | attend to 2     | ...

Backward has the same shape: the output's gradient comes in, dQ, dK and dV go home. Every rank posts all this in the
same order; what goes home waits behind the KV of the group that is being attended to, which is needed sooner. Heads do
not meet in attention, so results are those of one group; the bits are the same in every run with as many groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_fcp.config import HEAD_GROUPS
from megatron_fcp.plan.head_groups import HeadGroup, head_groups
from megatron_fcp.runtime.attention import BackwardPass, ForwardPass, check_inputs
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels.base import Kernel
from megatron_fcp.runtime.merge import sink_gradient
from megatron_fcp.runtime.reshuffle import CompiledRoute, Move, check_route
from megatron_fcp.runtime.transport import Transport

Gradient = torch.Tensor | None
Meanwhile = Callable[[], None]


def reshuffled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: CompiledPlan,
    route: CompiledRoute,
    comm: Transport | None,
    kernel: Kernel,
    softmax_scale: float | None = None,
    sink: torch.Tensor | None = None,
    max_groups: int = HEAD_GROUPS,
) -> torch.Tensor:
    """:func:`megatron_fcp.runtime.attention.fcp_attention` on tokens that lie elsewhere outside attention.

    Parameters
    ----------
    q, k, v : Tensor, shape [route.num_source, heads, channels]
        The rank's tokens in the order of the route's source layout; any strides.
    plan, comm, kernel, softmax_scale, sink
        As for :func:`megatron_fcp.runtime.attention.fcp_attention`.
    route : CompiledRoute
        From the layout outside to that of ``plan``.
    max_groups : int
        Groups of heads, at most; 1 moves everything in, attends to it, and moves it home. The same on all ranks.

    Returns
    -------
    Tensor, shape [route.num_source, num_heads, head_dim_v], dtype of ``q``
        In the source layout. 0 on tokens that the route skips, as are the gradients there.

    Raises
    ------
    ValueError
        For shapes that do not fit the plan, the route or each other.
    FcpTimeout, PeerLost
        If another rank stalls or dies.
    """
    check_route((q, k, v), route, comm)
    check_inputs(q, k, v, plan, comm, sink, num_tokens=route.route.num_source)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
    groups = head_groups(q.shape[1], k.shape[1], max_groups)
    return _Reshuffled.apply(q, k.to(q.dtype), v.to(q.dtype), sink, groups, (plan, comm, kernel, scale), route)


class _Pipeline(ABC):
    """Group after group: in, attended to, home; subclasses say what moves and how a group is attended to."""

    def __init__(self, groups: Sequence[HeadGroup], route: CompiledRoute, comm: Transport | None) -> None:
        self.groups, self.comm = groups, comm
        self.way_in, self.way_home = route, route.reverse()

    def run(self) -> None:
        going: list[Move] = []
        finished: tuple[HeadGroup, list[torch.Tensor]] | None = None

        def take_home() -> None:
            if finished is not None:
                group, results = finished
                going.append(Move(results, self.way_home, self.comm, into=self.home(group)))

        coming = Move(self.outside(self.groups[0]), self.way_in, self.comm)
        for i, group in enumerate(self.groups):
            here, last = coming, i == len(self.groups) - 1
            coming = here if last else Move(self.outside(self.groups[i + 1]), self.way_in, self.comm)
            finished = group, self.attend(group, here.finish(), take_home)
        take_home()
        for move in going:
            move.finish()

    @abstractmethod
    def outside(self, group: HeadGroup) -> list[torch.Tensor]:
        """What moves in."""

    @abstractmethod
    def home(self, group: HeadGroup) -> list[torch.Tensor]:
        """Where the results of a group go."""

    @abstractmethod
    def attend(self, group: HeadGroup, here: Sequence[torch.Tensor], take_home: Meanwhile) -> list[torch.Tensor]:
        """Results of a group, in the plan's layout; calls ``take_home`` once on the way."""


class _Forward(_Pipeline):
    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        sink: torch.Tensor | None,
        groups: Sequence[HeadGroup],
        how: tuple[Any, ...],
        route: CompiledRoute,
    ) -> None:
        super().__init__(groups, route, how[1])
        (self.q, self.k, self.v), self.sink, self.how = tensors, sink, how
        self.out = self.q.new_zeros(*self.q.shape[:2], self.v.shape[2])
        self.kept: list[torch.Tensor] = []  # q, k, v, out, lse of each group

    def outside(self, group: HeadGroup) -> list[torch.Tensor]:
        return [self.q[:, group.q], self.k[:, group.kv], self.v[:, group.kv]]

    def home(self, group: HeadGroup) -> list[torch.Tensor]:
        return [self.out[:, group.q]]

    def attend(self, group: HeadGroup, here: Sequence[torch.Tensor], take_home: Meanwhile) -> list[torch.Tensor]:
        sink = None if self.sink is None else self.sink[group.q]
        out, lse = ForwardPass(here[0], here[1], here[2], *self.how).run(sink, take_home)
        self.kept += [*here, out, lse]
        return [out]


class _Backward(_Pipeline):
    def __init__(
        self,
        dout: torch.Tensor,
        kept: Sequence[torch.Tensor],
        sink: torch.Tensor | None,
        groups: Sequence[HeadGroup],
        how: tuple[Any, ...],
        route: CompiledRoute,
    ) -> None:
        super().__init__(groups, route, how[1])
        self.dout, self.sink, self.how = dout, sink, how
        self.kept = dict(zip(groups, (kept[i : i + 5] for i in range(0, len(kept), 5)), strict=True))
        q, k, v, *_ = kept
        tokens, last = dout.shape[0], groups[-1]
        self.dq = q.new_zeros(tokens, last.q_stop, q.shape[2])
        self.dk = k.new_zeros(tokens, last.kv_stop, k.shape[2])
        self.dv = v.new_zeros(tokens, last.kv_stop, v.shape[2])
        self.dsink: list[torch.Tensor] = []

    def outside(self, group: HeadGroup) -> list[torch.Tensor]:
        return [self.dout[:, group.q]]

    def home(self, group: HeadGroup) -> list[torch.Tensor]:
        return [self.dq[:, group.q], self.dk[:, group.kv], self.dv[:, group.kv]]

    def attend(self, group: HeadGroup, here: Sequence[torch.Tensor], take_home: Meanwhile) -> list[torch.Tensor]:
        q, k, v, out, lse = self.kept.pop(group)
        if self.sink is not None:
            self.dsink.append(sink_gradient(self.sink[group.q], here[0], out, lse))
        return list(BackwardPass(here[0], q, k, v, out, lse, *self.how).run(take_home))


class _Reshuffled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        groups: tuple[HeadGroup, ...],
        how: tuple[CompiledPlan, Transport | None, Kernel, float],
        route: CompiledRoute,
    ) -> torch.Tensor:
        forward = _Forward((q, k, v), sink, groups, how, route)
        forward.run()
        ctx.save_for_backward(sink, *forward.kept)
        ctx.rest = groups, how, route
        return forward.out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: torch.Tensor
    ) -> tuple[Gradient, ...]:
        sink, *kept = ctx.saved_tensors
        backward = _Backward(dout, kept, sink, *ctx.rest)
        backward.run()
        dsink = None if sink is None else torch.cat(backward.dsink).to(sink.dtype)
        return backward.dq, backward.dk, backward.dv, dsink, None, None, None
