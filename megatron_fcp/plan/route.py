"""The way of tokens between two layouts: Megatron's own sharding outside attention, and the plan's inside.

::

    outside (zigzag)   rank 0: 0 1 6 7   rank 1: 2 3 4 5          token = index in the stream
    inside (blocks)    rank 0: 0 1 4 5   rank 1: 2 3 6 7
    route              rank 0 -> 1: 6 7, rank 1 -> 0: 4 5, the rest stays

One message per pair of ranks that has something to exchange, coloured into as many rounds as the busiest rank has
messages (:mod:`megatron_fcp.plan.coloring`); in a round a rank sends at most once and receives at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.coloring import color_edges


@dataclass(frozen=True)
class RouteRound:
    """One round of one rank; a peer of -1 means that the rank does not send, or receive.

    Attributes
    ----------
    send_peer, recv_peer : int
    send_index : IntArray, shape [num_sent]
        Tokens to gather from the source layout.
    recv_index : IntArray, shape [num_received]
        Where they go in the destination layout, in the sender's order.
    """

    send_peer: int
    send_index: IntArray
    recv_peer: int
    recv_index: IntArray


@dataclass(frozen=True)
class RankRoute:
    """What one rank does to take its tokens from the source layout to the destination layout.

    Attributes
    ----------
    rank, cp_size : int
    num_source, num_destination : int
        Tokens of the rank in either layout.
    stay_source, stay_destination : IntArray, shape [num_staying]
        Tokens that do not leave the rank.
    rounds : tuple of RouteRound
        As many on every rank.
    """

    rank: int
    cp_size: int
    num_source: int
    num_destination: int
    stay_source: IntArray
    stay_destination: IntArray
    rounds: tuple[RouteRound, ...]

    def reverse(self) -> RankRoute:
        """The way back: what was received is sent, in the same rounds."""
        back = tuple(RouteRound(r.recv_peer, r.recv_index, r.send_peer, r.send_index) for r in self.rounds)
        return RankRoute(
            self.rank,
            self.cp_size,
            self.num_destination,
            self.num_source,
            self.stay_destination,
            self.stay_source,
            back,
        )

    @property
    def sent_tokens(self) -> int:
        """Tokens that leave the rank."""
        return sum(r.send_index.size for r in self.rounds)


@dataclass(frozen=True)
class Route:
    """A redistribution of tokens over all ranks; :func:`make_route` builds it.

    Attributes
    ----------
    source_index, destination_index : tuple of IntArray
        Stream index of each token per rank.
    src, dst, round : IntArray, shape [num_messages]
    num_rounds : int
    skipped : IntArray, shape [num_skipped]
        Stream tokens that are not moved, ascending.
    """

    source_index: tuple[IntArray, ...]
    destination_index: tuple[IntArray, ...]
    src: IntArray
    dst: IntArray
    round: IntArray
    num_rounds: int
    skipped: IntArray

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return len(self.source_index)

    def rank_route(self, rank: int) -> RankRoute:
        """What ``rank`` sends, receives and keeps."""
        rank_of, slot_of = _place(self.destination_index)
        source_rank, source_slot = _place(self.source_index)
        live = np.ones(rank_of.size, dtype=bool)
        live[self.skipped] = False
        leaving = self.source_index[rank]
        leaving = np.sort(leaving[live[leaving]])  # stream order: both sides list a message's tokens in it
        coming = self.destination_index[rank]
        coming = np.sort(coming[live[coming]])
        stay = leaving[rank_of[leaving] == rank]
        rounds: list[RouteRound] = []
        for r in range(self.num_rounds):
            to = self.dst[(self.round == r) & (self.src == rank)]
            sender = self.src[(self.round == r) & (self.dst == rank)]
            send = leaving[rank_of[leaving] == to[0]] if to.size else leaving[:0]
            recv = coming[source_rank[coming] == sender[0]] if sender.size else coming[:0]
            rounds.append(
                RouteRound(
                    int(to[0]) if to.size else -1,
                    frozen(source_slot[send]),
                    int(sender[0]) if sender.size else -1,
                    frozen(slot_of[recv]),
                )
            )
        return RankRoute(
            rank,
            self.cp_size,
            self.source_index[rank].size,
            self.destination_index[rank].size,
            frozen(source_slot[stay]),
            frozen(slot_of[stay]),
            tuple(rounds),
        )


def make_route(
    source_index: Sequence[IntArray], destination_index: Sequence[IntArray], *, skipped: IntArray | None = None
) -> Route:
    """Route every token of a stream from one layout to another.

    Parameters
    ----------
    source_index, destination_index : sequence of IntArray, one per rank
        Stream index of each token that the rank holds, such as ``RankPlan.local_token_global_indices`` inside and
        :mod:`megatron_fcp.plan.sharding` outside attention. Over all ranks each layout holds every token once.
    skipped : IntArray, optional
        Stream tokens that need not travel, such as padding; they arrive as zeros.

    Raises
    ------
    ValueError
        If a layout does not hold every token of the stream exactly once, or the layouts disagree on ranks or tokens.
    """
    if len(source_index) != len(destination_index):
        raise ValueError(f"one layout is for {len(source_index)} ranks, the other for {len(destination_index)}")
    source_rank, _ = _place(source_index)
    destination_rank, _ = _place(destination_index)
    if source_rank.size != destination_rank.size:
        raise ValueError(f"one layout has {source_rank.size} tokens, the other {destination_rank.size}")
    cp_size = len(source_index)
    skipped = frozen([] if skipped is None else np.unique(skipped))
    moves = source_rank != destination_rank
    moves[skipped] = False
    pair = np.unique(source_rank[moves] * cp_size + destination_rank[moves])
    src, dst = frozen(pair // cp_size), frozen(pair % cp_size)
    round_ = color_edges(src, dst, cp_size)
    return Route(
        tuple(frozen(i) for i in source_index),
        tuple(frozen(i) for i in destination_index),
        src,
        dst,
        frozen(round_),
        int(round_.max(initial=-1)) + 1,
        skipped,
    )


def _place(index: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Rank and slot of every token of the stream."""
    total = sum(i.size for i in index)
    rank = np.full(total, -1, dtype=np.int64)
    slot = np.zeros(total, dtype=np.int64)
    for r, tokens in enumerate(index):
        if tokens.size and (tokens.min() < 0 or tokens.max() >= total):
            raise ValueError(f"rank {r} holds a token outside the stream of {total} tokens")
        rank[tokens] = r
        slot[tokens] = np.arange(tokens.size)
    if (rank < 0).any():
        missing = int(np.flatnonzero(rank < 0)[0])
        raise ValueError(f"no rank holds token {missing} of the stream, so another token is held twice")
    return rank, slot
