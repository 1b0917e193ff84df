"""A rough clock for pushes: when calls end, and in which order what they computed finds its links free.

Prices are the plan's (:class:`megatron_fcp.plan.cost.PushPrices`), in integers, so that every machine derives the same
rounds: with links that are slower by a factor of four, or messages that cost more than what they carry, an order played
with the wrong ones takes up to three times as long.
"""

from __future__ import annotations

import heapq

import numpy as np

from megatron_fcp.plan.arrays import IntArray, Scalar
from megatron_fcp.plan.backward import transfer_arrays
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.calls import Calls, message_stages
from megatron_fcp.plan.cost import PushPrices
from megatron_fcp.plan.held import attended_before, attended_when_posted
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.program import LOCAL
from megatron_fcp.plan.schedule import CommSchedule, tier_of
from megatron_fcp.plan.transfers import message_tokens


def call_times(
    table: BlockTable, schedule: CommSchedule, calls: Calls, ranks_per_node: int, prices: PushPrices
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """When each call begins and ends, when each pull starts, and when pulls leave each link free (see :func:`play`).

    Calls wait for the pulls of their stage.
    """
    m = schedule.messages
    tier = tier_of(m.src, m.dst, ranks_per_node)
    duration = prices.message + message_tokens(table, m) * per_token(prices)[tier] // 2
    stage = message_stages(schedule)
    before = np.zeros((2, len(m)), dtype=np.int64)  # calls of the sender and of the receiver that make room
    if schedule.waves is not None:
        room = attended_when_posted(schedule, attended_before(table, schedule, all_at_once=True))
        before = np.where(room > LOCAL, _calls_through(calls)[np.stack([m.src, m.dst]), room], 0)
    return _run_calls(
        m.src, m.dst, m.ptr, _feeders(schedule, table.num_blocks), tier, duration, stage, before, calls.ptr,
        calls.stage, calls.pairs,
    )  # fmt: skip


def _calls_through(calls: Calls) -> IntArray:
    """Calls of each rank up to the last one of each stage, shape [cp_size, most stages + 1]."""
    rank = np.repeat(np.arange(calls.ptr.size - 1), np.diff(calls.ptr))
    width = int(calls.stage.max(initial=LOCAL)) + 1
    made = np.bincount(rank * width + calls.stage, minlength=(calls.ptr.size - 1) * width).reshape(-1, width)
    made[:, LOCAL] = 1  # the rest of it comes last
    return np.cumsum(made, axis=1)


def per_token(prices: PushPrices) -> IntArray:
    """Price of a token by tier."""
    return np.array([prices.inside, prices.token])


def _feeders(schedule: CommSchedule, num_blocks: int) -> IntArray:
    """Message that brought each transfer's block to its sender; -1 where the sender owns it."""
    _, src, dst, block = transfer_arrays(schedule)
    message = np.repeat(np.arange(len(schedule.messages)), np.diff(schedule.messages.ptr))
    key, wanted = dst * num_blocks + block, src * num_blocks + block
    order = np.argsort(key)
    at = order[np.minimum(np.searchsorted(key[order], wanted), key.size - 1)]
    return np.where(key[at] == wanted, message[at], -1)


@njit(cache=True)
def _run_calls(
    src: IntArray, dst: IntArray, ptr: IntArray, feeder: IntArray, tier: IntArray, duration: IntArray,
    stage: IntArray, before: IntArray, call_ptr: IntArray, call_stage: IntArray, pairs: IntArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:  # fmt: skip
    """When each call begins and ends and each message starts; messages are posted in order."""
    num_ranks = call_ptr.size - 1
    leaves, enters = np.zeros((2, num_ranks), dtype=np.int64), np.zeros((2, num_ranks), dtype=np.int64)
    arrived = np.zeros(src.size, dtype=np.int64)
    ready = np.zeros((num_ranks, call_stage.max() + 1 if call_stage.size else 1), dtype=np.int64)
    begin, end = np.zeros(call_stage.size, dtype=np.int64), np.zeros(call_stage.size, dtype=np.int64)
    made = call_ptr[:-1].copy()
    for i in range(src.size + num_ranks):
        for side in range(2):
            if i >= src.size:  # the rest of all calls
                rank, through = i - src.size, call_ptr[i - src.size + 1]
            else:
                rank = dst[i] if side else src[i]
                through = call_ptr[rank] + before[side, i]
            while made[rank] < through:
                c = made[rank]
                begin[c] = max(end[c - 1] if c > call_ptr[rank] else 0, ready[rank, call_stage[c]])
                end[c] = begin[c] + pairs[c]
                made[rank] += 1
        if i >= src.size:
            continue
        start = max(leaves[tier[i], src[i]], enters[tier[i], dst[i]])
        for side in range(2):
            if before[side, i]:
                start = max(start, end[call_ptr[dst[i] if side else src[i]] + before[side, i] - 1])
        for k in range(ptr[i], ptr[i + 1]):
            if feeder[k] >= 0:
                start = max(start, arrived[feeder[k]])
        arrived[i] = start + duration[i]
        leaves[tier[i], src[i]] = enters[tier[i], dst[i]] = arrived[i]
        ready[dst[i], stage[i]] = max(ready[dst[i], stage[i]], arrived[i])
    return begin, end, arrived - duration, np.concatenate((leaves.ravel(), enters.ravel()))


@njit(cache=True)
def begun(ptr: IntArray, begin: IntArray, rank: IntArray, when: IntArray) -> IntArray:
    """Calls that ``rank`` has begun before ``when``."""
    out = np.zeros(rank.size, dtype=np.int64)
    for i in range(rank.size):
        mine = begin[ptr[rank[i]] : ptr[rank[i] + 1]]
        out[i] = np.searchsorted(mine, when[i])
    return out


@njit(cache=True)
def play(
    src: IntArray, dst: IntArray, tier: IntArray, ready: IntArray, duration: IntArray, child_ptr: IntArray,
    child: IntArray, urgency: IntArray, free_at: IntArray,
) -> IntArray:  # fmt: skip
    """When each push starts: once it is ready and both links are free; the most urgent first, then the first to come.

    ``free_at``: when each link is free, of senders, then of receivers, by tier, shape [4 * num_ranks]; kept up.
    What finds a link busy waits in that link's queue, so that nothing is looked at more often than links become free.
    """
    size = src.size
    left = child_ptr[1:] - child_ptr[:-1]
    parent_ptr, parent = _parents(child_ptr, child)
    ready = ready.copy()
    links, num_ranks = free_at.size, free_at.size // 4
    first, last = np.full(links, -1, dtype=np.int64), np.full(links, -1, dtype=np.int64)
    behind = np.full(size, -1, dtype=np.int64)  # next in the same queue
    events = [(ready[0], 0)]  # pushes, and from ``size`` on links that become free
    events.pop()
    for i in range(size):
        if left[i] == 0:
            heapq.heappush(events, (ready[i], i))
    for link in range(links):
        if free_at[link] > 0:
            heapq.heappush(events, (free_at[link], size + link))
    start = np.zeros(size, dtype=np.int64)
    while len(events) > 0:
        now, event = heapq.heappop(events)
        link = event - size
        i = event
        while True:
            if link >= 0:  # the next of its queue, as long as the link is free
                i = first[link]
                if i < 0 or free_at[link] > now:
                    break
                first[link] = behind[i]
            leaves = tier[i] * num_ranks + src[i]
            enters = (2 + tier[i]) * num_ranks + dst[i]
            if free_at[leaves] > now or free_at[enters] > now:
                queue = leaves if free_at[leaves] > now else enters
                _enqueue(i, queue, urgency, first, last, behind)
            else:
                start[i] = now
                end = now + duration[i]
                free_at[leaves] = free_at[enters] = end
                heapq.heappush(events, (end, size + leaves))
                heapq.heappush(events, (end, size + enters))
                for k in range(parent_ptr[i], parent_ptr[i + 1]):
                    p = parent[k]
                    ready[p] = max(ready[p], end)
                    left[p] -= 1
                    if left[p] == 0:
                        heapq.heappush(events, (ready[p], p))
            if link < 0:
                break
    return start


@njit(cache=True)
def _enqueue(i: Scalar, queue: Scalar, urgency: IntArray, first: IntArray, last: IntArray, behind: IntArray) -> None:
    """Put ``i`` behind all in the queue that are as urgent."""
    before, after = -1, first[queue]
    if after >= 0 and urgency[last[queue]] >= urgency[i]:
        before, after = last[queue], -1
    while after >= 0 and urgency[after] >= urgency[i]:
        before, after = after, behind[after]
    behind[i] = after
    if before < 0:
        first[queue] = i
    else:
        behind[before] = i
    if after < 0:
        last[queue] = i


@njit(cache=True)
def _parents(child_ptr: IntArray, child: IntArray) -> tuple[IntArray, IntArray]:
    """Messages that collect from message ``i``: ``parent[ptr[i]:ptr[i + 1]]``."""
    ptr = np.zeros(child_ptr.size, dtype=np.int64)
    for c in child:
        ptr[c + 1] += 1
    ptr = np.cumsum(ptr)
    parent = np.empty(child.size, dtype=np.int64)
    filled = ptr[:-1].copy()
    for i in range(child_ptr.size - 1):
        for k in range(child_ptr[i], child_ptr[i + 1]):
            parent[filled[child[k]]] = i
            filled[child[k]] += 1
    return ptr, parent


@njit(cache=True)
def cut_rounds(
    src: IntArray, dst: IntArray, tier: IntArray, order: IntArray, child_ptr: IntArray, child: IntArray, num_ranks: int
) -> IntArray:
    """Earliest round of each push behind the former ones of its links and those that it collects."""
    leaves = np.full((2, num_ranks), -1, dtype=np.int64)
    enters = np.full((2, num_ranks), -1, dtype=np.int64)
    round_ = np.zeros(src.size, dtype=np.int64)
    for i in order:
        r = max(leaves[tier[i], src[i]], enters[tier[i], dst[i]]) + 1
        for k in range(child_ptr[i], child_ptr[i + 1]):
            r = max(r, round_[child[k]] + 1)
        round_[i] = leaves[tier[i], src[i]] = enters[tier[i], dst[i]] = r
    return round_
