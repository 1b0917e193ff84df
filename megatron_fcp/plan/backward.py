"""The reverse of a schedule: rounds that push dKV partials back to their owners.

In backward every rank pulls KV again in the forward rounds and, one stage later, pushes the partial dKV of that stage
back along the reversed edges. Where a block was forwarded, the forwarder first collects the partials of those it
forwarded to, so the pushes of a block climb its tree from the leaves to the owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.coloring import color_edges
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.schedule import CommSchedule, tier_of
from megatron_fcp.plan.transfers import Messages


@dataclass(frozen=True)
class PushSchedule:
    """Rounds of dKV messages, ``src`` being the rank that holds a partial.

    Attributes
    ----------
    num_rounds : int
    messages : Messages
        Sorted by round, then sender.
    message_round : IntArray, shape [num_messages]
    after_pull : IntArray, shape [num_rounds]
        Push round ``p`` follows pull round ``after_pull[p]`` in the order that all ranks share; non-decreasing.
    sender_calls, receiver_calls : IntArray, shape [num_messages], or None
        Calls of the pass that the two ranks begin before they post the message; None: those that it needs, no more.
    """

    num_rounds: int
    messages: Messages
    message_round: IntArray
    after_pull: IntArray
    sender_calls: IntArray | None = None
    receiver_calls: IntArray | None = None


def transfer_arrays(schedule: CommSchedule) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(round, src, dst, block) of every single-block transfer, each shape [num_transfers]."""
    counts = np.diff(schedule.messages.ptr)
    return (
        np.repeat(schedule.message_round, counts),
        np.repeat(schedule.messages.src, counts),
        np.repeat(schedule.messages.dst, counts),
        schedule.messages.block,
    )


def reverse_schedule(schedule: CommSchedule, placement: Placement, ranks_per_node: int) -> PushSchedule:
    """Congestion-free push rounds for ``schedule``.

    Transfers are grouped by the pull round after which all that they carry can have been computed and by their height
    in the block's forwarding tree; each group is coloured on its own, so that the groups run in order.
    """
    round_, src, dst, block = transfer_arrays(schedule)
    ready, height = _ready_and_height(schedule, placement)
    if not round_.size:
        none = frozen([])
        return PushSchedule(0, Messages(none, none, frozen([0]), none), none, none)
    num_rounds = schedule.num_rounds
    group_key = ready * (num_rounds + 1) + height
    rounds: list[tuple[int, Messages]] = []
    after = 0
    for key in np.unique(group_key):
        chosen = np.flatnonzero(group_key == key)
        after = max(after, _next_stage_end(schedule, np.unique(dst[chosen]), int(key) // (num_rounds + 1)))
        grouped = _regroup(round_[chosen], dst[chosen], src[chosen], block[chosen])
        rounds.extend((after, m) for m in _split_rounds(grouped, placement.cp_size, ranks_per_node))
    return _assemble(rounds)


def _ready_and_height(schedule: CommSchedule, placement: Placement) -> tuple[IntArray, IntArray]:
    """Pull round after which a transfer's push may go, and its height over the leaves of the block's tree."""
    round_, src, dst, block = transfer_arrays(schedule)
    ready = np.zeros(round_.size, dtype=np.int64)
    for rank, ends in enumerate(schedule.stage_ends):
        mine = np.flatnonzero(dst == rank)
        ready[mine] = ends[np.searchsorted(ends, round_[mine])]
    height = np.zeros(round_.size, dtype=np.int64)
    if (placement.block_rank[block] == src).all():
        return ready, height
    received = {(int(r), int(b)): i for i, (r, b) in enumerate(zip(dst, block))}
    parent = [received.get((int(s), int(b)), -1) for s, b in zip(src, block)]
    for i, up in enumerate(parent):  # rounds ascend, so a parent comes before its children
        if up >= 0:
            ready[i] = max(ready[i], ready[up])
    for i in range(len(parent) - 1, -1, -1):
        up = parent[i]
        if up >= 0:
            ready[up] = max(ready[up], ready[i])
            height[up] = max(height[up], height[i] + 1)
    return ready, height


def _next_stage_end(schedule: CommSchedule, ranks: IntArray, ready: int) -> int:
    """Pull round that every pushing rank has posted by then anyway: the end of its next stage."""
    latest = ready
    for ends in (schedule.stage_ends[int(rank)] for rank in ranks):
        following = np.searchsorted(ends, ready, side="right")
        latest = max(latest, int(ends[following]) if following < ends.size else schedule.num_rounds - 1)
    return latest


def _regroup(round_: IntArray, src: IntArray, dst: IntArray, block: IntArray) -> Messages:
    """Messages of a group: what travelled together goes back together."""
    order = np.lexsort((block, dst, src, round_))
    round_, src, dst, block = round_[order], src[order], dst[order], block[order]
    changes = (round_[1:] != round_[:-1]) | (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])
    start = np.flatnonzero(np.append(True, changes))
    return Messages(frozen(src[start]), frozen(dst[start]), frozen(np.append(start, block.size)), frozen(block))


def _split_rounds(messages: Messages, cp_size: int, ranks_per_node: int) -> list[Messages]:
    tier = tier_of(messages.src, messages.dst, ranks_per_node)
    color = np.zeros(len(messages), dtype=np.int64)
    for t in (0, 1):
        chosen = np.flatnonzero(tier == t)
        color[chosen] = color_edges(messages.src[chosen], messages.dst[chosen], cp_size)
    order = np.lexsort((messages.dst, messages.src, color))
    edges = np.searchsorted(color[order], np.arange(1, int(color.max()) + 1))
    return [messages.take(members) for members in np.split(order, edges)]


def _assemble(rounds: list[tuple[int, Messages]]) -> PushSchedule:
    sizes = np.concatenate([np.diff(m.ptr) for _, m in rounds])
    messages = Messages(
        frozen(np.concatenate([m.src for _, m in rounds])),
        frozen(np.concatenate([m.dst for _, m in rounds])),
        frozen(np.append(0, np.cumsum(sizes))),
        frozen(np.concatenate([m.block for _, m in rounds])),
    )
    index = np.repeat(np.arange(len(rounds)), [len(m) for _, m in rounds])
    return PushSchedule(len(rounds), messages, frozen(index), frozen([after for after, _ in rounds]))
