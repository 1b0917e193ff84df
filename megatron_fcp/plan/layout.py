"""Where the tokens of every message lie on both of its ends.

KV travels from its *holder* (the owner's own tokens, or a stage buffer of a rank that forwards it) to the stage buffer
of its *taker*; in backward the taker sends partial dKV back to the holder, over the same memory ranges. Neighbouring
ranges merge where they are neighbours on both ends, so that both list the same segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen, offsets
from megatron_fcp.plan.backward import PushSchedule, transfer_arrays
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.calls import Calls
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.program import LOCAL
from megatron_fcp.plan.schedule import CommSchedule
from megatron_fcp.plan.transfers import Messages


@dataclass(frozen=True)
class Segments:
    """Memory ranges that the messages of a pass move.

    Attributes
    ----------
    ptr : IntArray, shape [num_messages + 1]
        Segments of message ``m`` are ``ptr[m]:ptr[m + 1]``.
    send_buffer, send_start, recv_buffer, recv_start, tokens : IntArray, shape [num_segments]
        Buffer (``LOCAL``, or a stage) and first token on the sender and on the receiver, and length.
    """

    ptr: IntArray
    send_buffer: IntArray
    send_start: IntArray
    recv_buffer: IntArray
    recv_start: IntArray
    tokens: IntArray


@dataclass(frozen=True)
class PlanLayout:
    """Buffers of all ranks: what each stage holds, and the segments of all messages.

    Attributes
    ----------
    arrived_ptr : IntArray, shape [cp_size + 1]
        What rank ``r`` receives is entry ``arrived_ptr[r]:arrived_ptr[r + 1]`` of the next two, by stage, then block.
    arrived_stage, arrived_block : IntArray, shape [num_transfers]
    arrival : IntArray, shape [num_transfers]
        The transfer of each entry.
    pull, push : Segments
    """

    arrived_ptr: IntArray
    arrived_stage: IntArray
    arrived_block: IntArray
    arrival: IntArray
    pull: Segments
    push: Segments

    def stage_blocks(self, rank: int, num_stages: int) -> list[IntArray]:
        """Ascending blocks in the buffers of stage ``1 .. num_stages`` of ``rank``."""
        mine = slice(self.arrived_ptr[rank], self.arrived_ptr[rank + 1])
        edges = np.searchsorted(self.arrived_stage[mine], np.arange(1, num_stages + 2))
        return np.split(self.arrived_block[mine], edges)[1:-1]

    def arrived_part(self, rank: int, calls: Calls) -> IntArray:
        """Part of its stage of all that ``rank`` receives, by stage, then block."""
        return calls.part[calls.of_transfer[self.arrival[self.arrived_ptr[rank] : self.arrived_ptr[rank + 1]]]]


def build_layout(table: BlockTable, placement: Placement, schedule: CommSchedule, push: PushSchedule) -> PlanLayout:
    """Lay out the buffers of all ranks; a pure function of the shared decisions."""
    _, src, dst, block = transfer_arrays(schedule)
    stage = _stages(schedule, dst)
    tokens = table.shared_stop[block] - table.shared_start[block]
    order = np.lexsort((block, stage, dst))
    taker_start = np.empty(block.size, dtype=np.int64)
    taker_start[order] = _starts_in_group(tokens[order], dst[order] * (schedule.num_rounds + 2) + stage[order])

    lookup = _Lookup(dst, block, table.num_blocks)
    slot = np.empty(table.num_blocks, dtype=np.int64)  # place of a block among its owner's
    by_owner = np.argsort(placement.block_rank, kind="stable")
    slot[by_owner] = np.arange(table.num_blocks) % max(table.num_blocks // placement.cp_size, 1)
    holder_buffer = np.full(block.size, LOCAL, dtype=np.int64)
    holder_start = slot[block] * table.block_size + table.shared_start[block] - block * table.block_size
    forwarded = np.flatnonzero(placement.block_rank[block] != src)
    source = lookup.transfers(src[forwarded], block[forwarded])
    holder_buffer[forwarded], holder_start[forwarded] = stage[source], taker_start[source]

    holder, taker = (holder_buffer, holder_start), (stage, taker_start)
    pushed, counts = push.messages.block, np.diff(push.messages.ptr)
    back = lookup.transfers(np.repeat(push.messages.src, counts), pushed)
    collector = np.repeat(push.messages.dst, counts)
    home_buffer = np.full(pushed.size, LOCAL, dtype=np.int64)
    home_start = slot[pushed] * table.block_size + table.shared_start[pushed] - pushed * table.block_size
    between = np.flatnonzero(placement.block_rank[pushed] != collector)
    held = lookup.transfers(collector[between], pushed[between])
    home_buffer[between], home_start[between] = stage[held], taker_start[held]
    return PlanLayout(
        arrived_ptr=frozen(np.searchsorted(dst[order], np.arange(placement.cp_size + 1))),
        arrived_stage=frozen(stage[order]),
        arrived_block=frozen(block[order]),
        arrival=frozen(order),
        pull=_segments(schedule.messages, *holder, *taker, tokens),
        push=_segments(push.messages, stage[back], taker_start[back], home_buffer, home_start, tokens[back]),
    )


class _Lookup:
    """Finds the transfer that brought a block to a rank."""

    def __init__(self, dst: IntArray, block: IntArray, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        key = dst * num_blocks + block
        self.order = np.argsort(key)
        self.key = key[self.order]

    def transfers(self, rank: IntArray, block: IntArray) -> IntArray:
        """Index of the transfer that brought each block to each rank, same shape."""
        return self.order[np.searchsorted(self.key, rank * self.num_blocks + block)]


def _stages(schedule: CommSchedule, dst: IntArray) -> IntArray:
    """Stage in which each transfer's receiver attends to it, shape [num_transfers]."""
    counts = np.diff(schedule.messages.ptr)
    round_ = np.repeat(schedule.message_round, counts)
    first = schedule.stage_ends[0]
    if all(ends is first for ends in schedule.stage_ends):
        return np.searchsorted(first, round_) + 1
    stage = np.empty(dst.size, dtype=np.int64)
    for rank, ends in enumerate(schedule.stage_ends):
        mine = np.flatnonzero(dst == rank)
        stage[mine] = np.searchsorted(ends, round_[mine]) + 1
    return stage


def _starts_in_group(lengths: IntArray, group: IntArray) -> IntArray:
    """Exclusive prefix sum of ``lengths`` that starts again at 0 wherever ``group`` changes."""
    start = offsets(lengths)[:-1]
    opens = np.append(True, group[1:] != group[:-1])[: group.size]
    return start - np.maximum.accumulate(np.where(opens, start, 0))


def _segments(
    messages: Messages,
    send_buffer: IntArray,
    send_start: IntArray,
    recv_buffer: IntArray,
    recv_start: IntArray,
    tokens: IntArray,
) -> Segments:
    """Merge transfers of a message that lie next to each other on both ends."""
    opens = np.ones(tokens.size, dtype=bool)
    opens[1:] = (
        (send_buffer[1:] != send_buffer[:-1])
        | (recv_buffer[1:] != recv_buffer[:-1])
        | (send_start[1:] != send_start[:-1] + tokens[:-1])
        | (recv_start[1:] != recv_start[:-1] + tokens[:-1])
    )
    opens[messages.ptr[:-1]] = True
    first = np.flatnonzero(opens)
    return Segments(
        frozen(np.searchsorted(first, messages.ptr)),
        frozen(send_buffer[first]),
        frozen(send_start[first]),
        frozen(recv_buffer[first]),
        frozen(recv_start[first]),
        frozen(np.add.reduceat(tokens, first) if first.size else first),
    )
