"""Push rounds between the pulls of waves.

A rank that may not keep all that it receives may not keep its partial dKV either: what it computed in a wave goes home
before it attends to the wave after the next. Ranks that may keep theirs push when links are free. All of it is played
through on one clock (:mod:`plan.push_clock`), and a push takes its place among the pulls by what the clock shows::

    slot            0        1        2        3        4
    pulls        wave 0   wave 1   wave 2   wave 3
    pushes                          wave 0   wave 1   the rest       of ranks over the limit, at the latest
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import BoolArray, FloatArray, IntArray, frozen
from megatron_fcp.plan.backward import PushSchedule, transfer_arrays
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.bounded import received_tokens
from megatron_fcp.plan.calls import Calls
from megatron_fcp.plan.cost import PushPrices
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.program import LOCAL
from megatron_fcp.plan.push_clock import begun, call_times, cut_rounds, play
from megatron_fcp.plan.push_tree import Climb, climb
from megatron_fcp.plan.schedule import CommSchedule, Waves, tier_of
from megatron_fcp.plan.transfers import Messages


def push_in_waves(
    table: BlockTable,
    placement: Placement,
    schedule: CommSchedule,
    waves: Waves,
    calls: Calls,
    ranks_per_node: int,
    prices: PushPrices,
) -> PushSchedule:
    """Push rounds for a schedule in waves."""
    n, count = placement.cp_size, waves.ends.size
    _, _, dst, block = transfer_arrays(schedule)
    over = received_tokens(table, schedule, n) > waves.held_tokens
    begin, end, pulled, _ = call_times(table, schedule, calls, ranks_per_node, prices)
    p = climb(table, placement, (dst, block, calls.of_transfer), end, over, ranks_per_node, prices)
    free = np.zeros(4 * n, dtype=np.int64)
    when = play(p.src, p.dst, p.tier, end[p.call], p.duration, p.child_ptr, p.child, p.depth, free.copy())
    called = np.searchsorted(waves.ends, _last_rounds(schedule, calls)[p.call])
    group = np.where(over[p.src], np.minimum(called, count - 2), -1)
    slot = _slots(when, group, called, _openings(pulled, schedule, waves), p)

    round_ = np.zeros(slot.size, dtype=np.int64)
    num_rounds = 0
    slot_of_round: list[int] = []
    for s in range(count + 1):
        _occupy(free, schedule, waves, pulled, s, ranks_per_node)
        chosen = np.flatnonzero(slot == s)
        if chosen.size:
            q = _part(p, chosen)
            when[chosen] = play(q.src, q.dst, q.tier, end[q.call], q.duration, q.child_ptr, q.child, q.depth, free)
            order = np.argsort(when[chosen], kind="stable")
            round_[chosen] = num_rounds + cut_rounds(q.src, q.dst, q.tier, order, q.child_ptr, q.child, n)
            num_rounds = int(round_[chosen].max()) + 1
            slot_of_round += [s] * (num_rounds - len(slot_of_round))
    by = np.lexsort((p.dst, p.src, round_))
    posted = _posted(schedule, waves, calls, over)
    return PushSchedule(
        num_rounds,
        Messages(frozen(p.src), frozen(p.dst), frozen(p.ptr), frozen(p.block)).take(by),
        frozen(round_[by]),
        frozen(waves.ends[np.minimum(slot_of_round, count - 1)]),
        frozen(np.minimum(begun(calls.ptr, begin, p.src, when), posted[slot, p.src])[by]),
        frozen(np.minimum(begun(calls.ptr, begin, p.dst, when), posted[slot, p.dst])[by]),
    )


def _last_rounds(schedule: CommSchedule, calls: Calls) -> IntArray:
    """Round with which the stage of each call ends; -1 for the local one."""
    out = np.full(calls.stage.size, -1, dtype=np.int64)
    for rank, ends in enumerate(schedule.stage_ends):
        mine = slice(calls.ptr[rank], calls.ptr[rank + 1])
        out[mine] = np.append(-1, ends)[calls.stage[mine]]
    return out


def _openings(pulled: IntArray, schedule: CommSchedule, waves: Waves) -> FloatArray:
    """When half of the pulls of each wave have started; shape [num_waves]."""
    wave = np.searchsorted(waves.ends, schedule.message_round)
    return np.array([np.median(pulled[wave == w]) for w in range(waves.ends.size)])


def _slots(when: IntArray, group: IntArray, called: IntArray, opens: FloatArray, p: Climb) -> IntArray:
    """Place of each push among the pulls: behind those of wave ``slot``, at the end for one more."""
    by_clock = np.searchsorted(opens, when, side="right") - 1
    due = group >= 0
    last = int(group.max(initial=-1))
    early = due & (group < last)
    closes = when[early].max(initial=-1)
    by_clock = np.where((by_clock == opens.size - 1) & (when > closes), opens.size, by_clock)
    slot = np.where(due, group + 2, np.maximum(by_clock, called))
    parent = np.repeat(np.arange(slot.size), np.diff(p.child_ptr))
    while (slot[p.child] > slot[parent]).any():
        np.maximum.at(slot, parent, slot[p.child])
    return slot


def _occupy(
    free: IntArray, schedule: CommSchedule, waves: Waves, pulled: IntArray, wave: int, ranks_per_node: int
) -> None:
    """Move on when links are free to behind the pulls of a wave."""
    m, n = schedule.messages, free.size // 4
    if wave < waves.ends.size:
        mine = np.flatnonzero(np.searchsorted(waves.ends, schedule.message_round) == wave)
        tier = tier_of(m.src[mine], m.dst[mine], ranks_per_node)
        np.maximum.at(free, tier * n + m.src[mine], pulled[mine])
        np.maximum.at(free, (2 + tier) * n + m.dst[mine], pulled[mine])


def _part(p: Climb, chosen: IntArray) -> Climb:
    """Some of the messages; what others collect for them has come."""
    place = np.full(p.src.size, -1, dtype=np.int64)
    place[chosen] = np.arange(chosen.size)
    parent = place[np.repeat(np.arange(p.src.size), np.diff(p.child_ptr))]
    child = place[p.child]
    kept = np.flatnonzero((parent >= 0) & (child >= 0))  # in order of parents
    child_ptr = np.searchsorted(parent[kept], np.arange(chosen.size + 1))
    return p._replace(
        src=p.src[chosen], dst=p.dst[chosen], tier=p.tier[chosen], duration=p.duration[chosen], call=p.call[chosen],
        depth=p.depth[chosen], child_ptr=child_ptr, child=child[kept],
    )  # fmt: skip


def _posted(schedule: CommSchedule, waves: Waves, calls: Calls, over: BoolArray) -> IntArray:
    """Calls that each rank may have begun before the pushes of each slot, shape [num_waves + 1, cp_size].

    Those whose pulls are posted; on ranks over the limit the last of these waves waits until there is room for its dKV.
    """
    count = waves.ends.size
    last = np.searchsorted(waves.ends, _last_rounds(schedule, calls))
    rank = np.repeat(np.arange(over.size), np.diff(calls.ptr))
    out = np.empty((count + 1, over.size), dtype=np.int64)
    for slot in range(count):
        early = np.where(calls.stage == LOCAL, calls.part == 0, last <= slot - over[rank])
        out[slot] = np.bincount(rank[early], minlength=over.size)
    out[count] = np.diff(calls.ptr)
    return out
