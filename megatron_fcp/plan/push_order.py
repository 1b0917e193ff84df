"""When partial dKV goes home: pushes in the order in which they can leave, by a rough clock of the backward pass.

A link serves what is posted first, so a push that is not ready holds up those behind it. Colouring groups of pushes (as
:mod:`plan.backward` does) gives few rounds per group but lets ready pushes wait for others. Here every push is played
through on a clock: a stage ends after the pairs that its rank attends to up to then, a push starts once its stage and
the pushes that its holder collects are through and both links are free, earliest start first. The order that results is
cut into rounds; how good it is hardly depends on the prices below, which are those of an H100 with 45 GB/s between
nodes, 8 query heads per KV head, in integers, so that every machine derives the same rounds.

A push is posted after the pulls of its rank's next stage but one: those wait for its stage anyway
(:mod:`plan.program`), so it neither delays a pull nor keeps a buffer alive for longer.
"""

from __future__ import annotations

import heapq

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen, offsets
from megatron_fcp.plan.backward import PushSchedule, transfer_arrays
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.schedule import CommSchedule, tier_of
from megatron_fcp.plan.transfers import Messages

PAIRS_PER_TOKEN = (128, 1024)  # backward's pair times in which a token of fp32 dKV travels: inside, between nodes
PAIRS_PER_MESSAGE = 1 << 16


def push_by_arrival(
    table: BlockTable, placement: Placement, schedule: CommSchedule, ranks_per_node: int
) -> PushSchedule:
    """Push rounds for ``schedule``; causal masks only."""
    assert table.mask == "causal", table.mask
    m, n = schedule.messages, placement.cp_size
    if not len(m):
        none = frozen([])
        return PushSchedule(0, Messages(none, none, frozen([0]), none), none, none)
    stage_ptr = offsets([ends.size + 1 for ends in schedule.stage_ends])
    stage, own, after = _stages(schedule, n)
    child_ptr, child = _children(schedule, placement, table.num_blocks)
    clock = _clock(table, placement, schedule, stage, stage_ptr)
    tier = tier_of(m.src, m.dst, ranks_per_node)
    tokens = np.add.reduceat((table.shared_stop - table.shared_start)[m.block], m.ptr[:-1])
    duration = PAIRS_PER_MESSAGE + tokens * np.array(PAIRS_PER_TOKEN)[tier]
    place = _play(m.src, m.dst, tier, clock[stage_ptr[m.dst] + stage], duration, child_ptr, child, n)
    _agree(after, own, child_ptr, child)
    order = np.lexsort((place, after))
    round_ = _cut(m.src, m.dst, tier, after, order, child_ptr, child, n)
    by_round = np.lexsort((m.src, m.dst, round_))  # pushes run from dst to src
    back = m.take(by_round)
    num_rounds = int(round_.max()) + 1
    after_pull = np.zeros(num_rounds, dtype=np.int64)
    after_pull[round_] = after  # equal within a round
    return PushSchedule(
        num_rounds, Messages(back.dst, back.src, back.ptr, back.block), frozen(round_[by_round]), frozen(after_pull)
    )


def _stages(schedule: CommSchedule, cp_size: int) -> tuple[IntArray, IntArray, IntArray]:
    """Of each message: its receiver's stage (from 1), and the last pull rounds of that and of the next but one."""
    m = schedule.messages
    stage, own, after = np.zeros((3, len(m)), dtype=np.int64)
    by_receiver = np.argsort(m.dst, kind="stable")
    edge = np.searchsorted(m.dst[by_receiver], np.arange(cp_size + 1))
    for rank, ends in enumerate(schedule.stage_ends):
        mine = by_receiver[edge[rank] : edge[rank + 1]]
        stage[mine] = np.searchsorted(ends, schedule.message_round[mine]) + 1
        own[mine] = ends[stage[mine] - 1]
        later = stage[mine] + 1
        after[mine] = np.where(later < ends.size, ends[np.minimum(later, ends.size - 1)], schedule.num_rounds - 1)
    return stage, own, after


@njit(cache=True)
def _agree(after: IntArray, own: IntArray, child_ptr: IntArray, child: IntArray) -> None:
    """Let ``after`` respect both ends of the pushes that climb a forwarding tree; pulls of children come later.

    A rank attends to a stage before partials for it may arrive, so all that the stage pulls must be posted by then; and
    a holder's own push comes after those that it collects.
    """
    for i in range(after.size):
        for k in range(child_ptr[i], child_ptr[i + 1]):
            own[child[k]] = max(own[child[k]], own[i])
    for i in range(after.size - 1, -1, -1):
        after[i] = max(after[i], own[i])
        for k in range(child_ptr[i], child_ptr[i + 1]):
            after[i] = max(after[i], after[child[k]])


def _children(schedule: CommSchedule, placement: Placement, num_blocks: int) -> tuple[IntArray, IntArray]:
    """Messages that pass on a block which message ``i`` brought are ``child[ptr[i]:ptr[i + 1]]``, each once."""
    m = schedule.messages
    _, src, dst, block = transfer_arrays(schedule)
    message = np.repeat(np.arange(len(m)), np.diff(m.ptr))
    relayed = np.flatnonzero(placement.block_rank[block] != src)
    key = dst * num_blocks + block
    order = np.argsort(key)
    source = message[order[np.searchsorted(key[order], src[relayed] * num_blocks + block[relayed])]]
    pair = np.unique(source * len(m) + message[relayed])
    return np.searchsorted(pair // len(m), np.arange(len(m) + 1)), pair % len(m)


def _clock(
    table: BlockTable, placement: Placement, schedule: CommSchedule, stage: IntArray, stage_ptr: IntArray
) -> IntArray:
    """Pairs that each rank has attended to at the end of each of its stages, flat by ``stage_ptr``."""
    m, nb = schedule.messages, table.num_blocks
    documents = max(table.document_length.size, 1)
    counts = np.diff(m.ptr)
    receiver, call = np.repeat(m.dst, counts), np.repeat(stage_ptr[m.dst] + stage, counts)
    owner = placement.block_rank[table.fragment_block]
    place = (owner * documents + table.fragment_document) * nb + table.fragment_block
    order = np.argsort(place)
    place = place[order]
    prefix = offsets(table.fragment_length[order])
    travelling = table.fragment_document[table.fragment_ptr[1:] - 1][m.block]  # a block's last document goes on
    wanted = (receiver * documents + travelling) * nb
    queries = (
        prefix[np.searchsorted(place, wanted + nb)] - prefix[np.searchsorted(place, wanted + m.block, side="right")]
    )
    pairs = np.zeros(int(stage_ptr[-1]), dtype=np.int64)
    np.add.at(pairs, call, queries * (table.shared_stop - table.shared_start)[m.block])
    held = np.zeros(placement.cp_size * documents, dtype=np.int64)
    np.add.at(held, owner * documents + table.fragment_document, table.fragment_length)
    local = (held * (held + 1) // 2).reshape(placement.cp_size, documents).sum(axis=1)
    pairs[stage_ptr[:-1]] += local
    total = np.cumsum(pairs)
    before = np.append(0, total[stage_ptr[1:-1] - 1])
    return total - np.repeat(before, np.diff(stage_ptr))


@njit(cache=True)
def _play(
    src: IntArray, dst: IntArray, tier: IntArray, ready: IntArray, duration: IntArray, child_ptr: IntArray,
    child: IntArray, num_ranks: int,
) -> IntArray:  # fmt: skip
    """Place of each push in the order of starts; ties go to the earlier pull."""
    size = src.size
    left = child_ptr[1:] - child_ptr[:-1]
    parent_count = np.zeros(size + 1, dtype=np.int64)
    for c in child:
        parent_count[c + 1] += 1
    parent_ptr = np.cumsum(parent_count)
    parent = np.empty(child.size, dtype=np.int64)
    filled = parent_ptr[:-1].copy()
    for i in range(size):
        for k in range(child_ptr[i], child_ptr[i + 1]):
            parent[filled[child[k]]] = i
            filled[child[k]] += 1
    ready = ready.copy()
    leaves = np.zeros((2, num_ranks), dtype=np.int64)
    enters = np.zeros((2, num_ranks), dtype=np.int64)
    heap = [(ready[0], 0)]
    heap.pop()
    for i in range(size):
        if left[i] == 0:
            heapq.heappush(heap, (ready[i], i))
    place = np.zeros(size, dtype=np.int64)
    done = 0
    while len(heap) > 0:
        when, i = heapq.heappop(heap)
        start = max(when, leaves[tier[i], dst[i]], enters[tier[i], src[i]])
        if start > when:
            heapq.heappush(heap, (start, i))
            continue
        end = start + duration[i]
        leaves[tier[i], dst[i]] = end
        enters[tier[i], src[i]] = end
        place[i] = done
        done += 1
        for k in range(parent_ptr[i], parent_ptr[i + 1]):
            p = parent[k]
            ready[p] = max(ready[p], end)
            left[p] -= 1
            if left[p] == 0:
                heapq.heappush(heap, (ready[p], p))
    return place


@njit(cache=True)
def _cut(
    src: IntArray, dst: IntArray, tier: IntArray, after: IntArray, order: IntArray, child_ptr: IntArray,
    child: IntArray, num_ranks: int,
) -> IntArray:  # fmt: skip
    """Earliest round of each push behind its links' former ones, its children's, and all with an earlier ``after``."""
    leaves = np.full((2, num_ranks), -1, dtype=np.int64)
    enters = np.full((2, num_ranks), -1, dtype=np.int64)
    round_ = np.zeros(src.size, dtype=np.int64)
    floor, top, current = 0, 0, -1
    for i in order:
        if after[i] != current:
            current, floor = after[i], top
        r = max(floor, leaves[tier[i], dst[i]] + 1, enters[tier[i], src[i]] + 1)
        for k in range(child_ptr[i], child_ptr[i + 1]):
            r = max(r, round_[child[k]] + 1)
        round_[i] = r
        leaves[tier[i], dst[i]] = r
        enters[tier[i], src[i]] = r
        top = max(top, r + 1)
    return round_
