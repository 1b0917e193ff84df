"""Moving tokens between two layouts, with gradients flowing back along the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.route import RankRoute
from megatron_fcp.runtime.compiled import upload
from megatron_fcp.runtime.transport import Message, Pending, Transport


class CompiledRoute:
    """A :class:`RankRoute` with its index arrays on ``device``, built once per plan.

    Attributes
    ----------
    route : RankRoute
    device : torch.device
    """

    def __init__(self, route: RankRoute, device: torch.device | str = "cpu") -> None:
        self.route, self.device = route, torch.device(device)

        def put(index: IntArray) -> torch.Tensor:
            return torch.from_numpy(index.copy()).to(self.device)

        self.stay_source, self.stay_destination = put(route.stay_source), put(route.stay_destination)
        self.send_index = [put(r.send_index) for r in route.rounds]
        self.recv_index = [put(r.recv_index) for r in route.rounds]
        self._back: CompiledRoute | None = None

    def reverse(self) -> CompiledRoute:
        """The way back; its own reverse is this route."""
        if self._back is None:
            back = self._back = object.__new__(CompiledRoute)
            back.route, back.device, back._back = self.route.reverse(), self.device, self
            back.stay_source, back.stay_destination = self.stay_destination, self.stay_source
            back.send_index, back.recv_index = self.recv_index, self.send_index
        return self._back

    def to(self, device: torch.device | str) -> CompiledRoute:
        """This route on another device; its index arrays go there in one copy."""
        other = object.__new__(CompiledRoute)
        other.route, other.device, other._back = self.route, torch.device(device), None
        mine = (self.stay_source, self.stay_destination, *self.send_index, *self.recv_index)
        other.stay_source, other.stay_destination, *rounds = upload(mine, device)
        other.send_index, other.recv_index = rounds[: len(self.send_index)], rounds[len(self.send_index) :]
        return other


def reshuffle(
    tensors: Sequence[torch.Tensor], route: CompiledRoute, comm: Transport | None
) -> tuple[torch.Tensor, ...]:
    """Move the tokens (first dimension) of several tensors in one pass.

    Parameters
    ----------
    tensors : sequence of Tensor, shape [route.num_source, ...]
        Such as q, k and v; any strides and dtypes.
    route : CompiledRoute
    comm : Transport or None
        None at context-parallel size 1.

    Returns
    -------
    tuple of Tensor, shape [route.num_destination, ...]
        Tokens that the route skips are exactly 0, and so are the gradients of those that it left behind.

    Raises
    ------
    ValueError
        If a tensor does not have as many tokens as the route's source layout.
    """
    check_route(tensors, route, comm)
    return _Reshuffle.apply(route, comm, *tensors)


def check_route(tensors: Sequence[torch.Tensor], route: CompiledRoute, comm: Transport | None) -> None:
    """Raise ValueError for tensors or a communicator that do not fit a route."""
    for t in tensors:
        if t.shape[0] != route.route.num_source:
            raise ValueError(f"the route takes {route.route.num_source} tokens; got a tensor of shape {tuple(t.shape)}")
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    if (rank, size) != (route.route.rank, route.route.cp_size):
        raise ValueError(
            f"the route is that of rank {route.route.rank} of {route.route.cp_size}, "
            f"but the communicator is rank {rank} of {size}"
        )


class Move:
    """Tokens on their way: posted when built, there after :meth:`finish`.

    Parameters
    ----------
    tensors : sequence of Tensor, shape [route.num_source, ...]
        Any strides. May be changed once this is built.
    route, comm
        As for :func:`reshuffle`.
    into : sequence of Tensor, optional, shape [route.num_destination, ...]
        Where they go, any strides; tokens that the route skips are left as they are. Default: new zeros.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        route: CompiledRoute,
        comm: Transport | None,
        into: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._route = route
        count = route.route.num_destination
        self._into = tuple(t.new_zeros(count, *t.shape[1:]) for t in tensors) if into is None else tuple(into)
        self._travelling: list[tuple[int, Pending, list[torch.Tensor]]] = []
        rounds = route.route.rounds
        position = None if comm is None else comm.position
        before = None if position is None else replace(position)
        if position is not None:
            position.enter("reshuffle", position.digest, len(rounds))
        for i, r in enumerate(rounds):
            if r.send_peer < 0 and r.recv_peer < 0:
                continue
            assert comm is not None, "a route that moves tokens needs a transport"
            comm.position.step, comm.position.round = i, f"round {i}"
            sends: list[Message] = []
            recvs: list[Message] = []
            if r.send_peer >= 0:
                sends = [(r.send_peer, t.index_select(0, route.send_index[i])) for t in tensors]
            if r.recv_peer >= 0:
                recvs = [(r.recv_peer, t.new_empty(r.recv_index.size, *t.shape[1:])) for t in tensors]
            self._travelling.append((i, comm.post(sends, recvs), [t for _, t in recvs]))
        for source, destination in zip(tensors, self._into):
            destination.index_copy_(0, route.stay_destination, source.index_select(0, route.stay_source))
        if position is not None and before is not None:
            vars(position).update(vars(before))  # this may have been posted in the middle of a pass

    def finish(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the destination layout."""
        for i, pending, received in self._travelling:
            pending.wait_recvs()
            for part, destination in zip(received, self._into):
                destination.index_copy_(0, self._route.recv_index[i], part)
        for _, pending, _ in self._travelling:
            pending.wait()
        self._travelling.clear()
        return self._into


class _Reshuffle(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, route: CompiledRoute, comm: Transport | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.route, ctx.comm = route, comm
        return Move(tensors, route, comm).finish()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *Move(grad_outputs, ctx.route.reverse(), ctx.comm).finish())
