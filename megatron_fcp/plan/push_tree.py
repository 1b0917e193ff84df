"""Push rounds for plans in which blocks are passed on: trees of their own, in the order of a rough clock.

A block's partials could climb the tree in which it was pulled, but that is deep (a block passes from rank to rank as
links become free) and its messages mix blocks that are attended to at different times. All receivers hold a partial, so
any tree over them will do::

    owner <- leaders of two other nodes <- leaders of four more <- ...     between nodes, log-many hops
    leader <- the other receivers of its node                              inside a node

Every push is played through on a clock: calls end after the pairs that their rank attends to up to then, a push starts
once what it carries is computed and collected and both links are free, first come, first served. The order that
results is cut into rounds. How good it is hardly depends on the prices below, which are those of an H100 with 45 GB/s
between nodes, 8 query heads per KV head, in integers, so that every machine derives the same rounds.
"""

from __future__ import annotations

import heapq

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.backward import PushSchedule, transfer_arrays
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.calls import Calls, message_stages
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.schedule import CommSchedule, tier_of
from megatron_fcp.plan.transfers import Messages

PAIRS_PER_TOKEN = (128, 1024)  # backward's pair times in which a token of fp32 dKV travels: inside, between nodes
PAIRS_PER_MESSAGE = 1 << 16
CHUNK_TOKENS = 1024  # of a document per rank of a node, between which trees change
RUN_BLOCKS = 4  # consecutive blocks with the same leader in a node


def push_by_tree(
    table: BlockTable, placement: Placement, schedule: CommSchedule, calls: Calls, ranks_per_node: int
) -> PushSchedule:
    """Push rounds for ``schedule``, all of them behind its pulls."""
    n = placement.cp_size
    _, _, dst, block = transfer_arrays(schedule)
    order = np.lexsort((dst, block))
    rank, block, call = dst[order], block[order], calls.of_transfer[order]
    chunk_blocks = max(CHUNK_TOKENS * ranks_per_node // table.block_size, 1)
    length = table.shared_stop - table.shared_start
    up, depth = _trees(rank, block, placement.block_rank, length, chunk_blocks, ranks_per_node)
    chunk = block // chunk_blocks
    by = np.lexsort((block, chunk, -depth, call, up, rank))
    rank, block, call, up, depth, chunk = (a[by] for a in (rank, block, call, up, depth, chunk))
    new = np.ones(rank.size, dtype=bool)  # where what leaves a rank together begins
    new[1:] = np.any([np.diff(key) != 0 for key in (rank, up, call, depth, chunk)], axis=0)
    start = np.flatnonzero(new)
    ptr = np.append(start, rank.size)
    src, to = rank[start], up[start]
    child_ptr, child = _children(rank, up, block, np.cumsum(new) - 1, table.num_blocks)

    begin, end = _call_times(table, schedule, calls, ranks_per_node)
    tier = tier_of(src, to, ranks_per_node)
    tokens = np.add.reduceat(length[block], start)
    duration = PAIRS_PER_MESSAGE + tokens * np.array(PAIRS_PER_TOKEN)[tier]
    when = _play(src, to, tier, end[call[start]], duration, child_ptr, child, n)
    round_ = _cut(src, to, tier, np.argsort(when, kind="stable"), child_ptr, child, n)
    in_rounds = np.lexsort((to, src, round_))
    messages = Messages(frozen(src), frozen(to), frozen(ptr), frozen(block)).take(in_rounds)
    num_rounds = int(round_.max()) + 1
    return PushSchedule(
        num_rounds, messages, frozen(round_[in_rounds]), frozen(np.full(num_rounds, schedule.num_rounds - 1)),
        frozen(_begun(calls.ptr, begin, src, when)[in_rounds]), frozen(_begun(calls.ptr, begin, to, when)[in_rounds]),
    )  # fmt: skip


@njit(cache=True)
def _trees(
    rank: IntArray, block: IntArray, owner: IntArray, tokens: IntArray, chunk_blocks: int, ranks_per_node: int
) -> tuple[IntArray, IntArray]:
    """Where each receiver's partial goes, and over how many hops it gets home; sorted by block, then rank.

    Nodes that have collected little so far collect for others; their order is the same for all blocks of a chunk.
    """
    up, depth = np.empty_like(rank), np.empty_like(rank)
    num_nodes = (owner.max() if owner.size else 0) // ranks_per_node + 1
    num_nodes = max(num_nodes, (rank.max() if rank.size else 0) // ranks_per_node + 1)
    collected, turn = np.zeros(num_nodes, dtype=np.int64), np.arange(num_nodes)
    low, turns = np.empty(num_nodes + 1, dtype=np.int64), np.empty(num_nodes, dtype=np.int64)
    leaders = np.empty(num_nodes + 1, dtype=np.int64)
    chunk = -1
    i = 0
    while i < rank.size:
        if block[i] // chunk_blocks != chunk:
            chunk = block[i] // chunk_blocks
            turn[np.argsort(collected, kind="mergesort")] = np.arange(num_nodes)
        root = owner[block[i]]
        home = root // ranks_per_node
        nodes = 0
        j = i
        while j < rank.size and block[j] == block[i]:
            k = j
            while k < rank.size and block[k] == block[i] and rank[k] // ranks_per_node == rank[j] // ranks_per_node:
                k += 1
            if rank[j] // ranks_per_node == home:
                up[j:k], depth[j:k] = root, 1
            else:
                low[nodes], turns[nodes] = j, turn[rank[j] // ranks_per_node]
                nodes += 1
            j = k
        leaders[0] = root
        place = np.argsort(turns[:nodes], kind="mergesort")
        for number in range(1, nodes + 1):
            first = low[place[number - 1]]
            last = first
            while last < j and rank[last] // ranks_per_node == rank[first] // ranks_per_node:
                last += 1
            leader = first + (block[i] // RUN_BLOCKS) % (last - first)
            leaders[number] = rank[leader]
            above = (number - 1) // 2
            hops, at = 1, above
            while at:
                at = (at - 1) // 2
                hops += 1
            up[first:last], depth[first:last] = rank[leader], hops + 1
            up[leader], depth[leader] = leaders[above], hops
            collected[leaders[above] // ranks_per_node] += tokens[block[i]]
        i = j
    return up, depth


def _children(
    rank: IntArray, up: IntArray, block: IntArray, message: IntArray, num_blocks: int
) -> tuple[IntArray, IntArray]:
    """Messages whose partials message ``i`` collects are ``child[ptr[i]:ptr[i + 1]]``, each once."""
    key = rank * num_blocks + block
    order = np.argsort(key)
    at = np.minimum(np.searchsorted(key[order], up * num_blocks + block), key.size - 1)
    parent = order[at]
    collected = np.flatnonzero(key[parent] == up * num_blocks + block)
    size = int(message[-1]) + 1
    pair = np.unique(message[parent[collected]] * size + message[collected])
    return np.searchsorted(pair // size, np.arange(size + 1)), pair % size


def _call_times(
    table: BlockTable, schedule: CommSchedule, calls: Calls, ranks_per_node: int
) -> tuple[IntArray, IntArray]:
    """When each call begins and ends; calls wait for the pulls of their stage."""
    m = schedule.messages
    tokens = np.add.reduceat((table.shared_stop - table.shared_start)[m.block], m.ptr[:-1])
    tier = tier_of(m.src, m.dst, ranks_per_node)
    duration = PAIRS_PER_MESSAGE + tokens * np.array(PAIRS_PER_TOKEN)[tier] // 2
    arrived = _arrivals(m.src, m.dst, m.ptr, _feeders(schedule, table.num_blocks), tier, duration, calls.ptr.size - 1)
    stage = message_stages(schedule)
    rank = np.repeat(np.arange(calls.ptr.size - 1), np.diff(calls.ptr))
    most = int(calls.stage.max(initial=0)) + 1
    ready = np.zeros((calls.ptr.size - 1) * most, dtype=np.int64)
    np.maximum.at(ready, m.dst * most + stage, arrived)
    return _run_calls(calls.ptr, ready[rank * most + calls.stage], calls.pairs)


def _feeders(schedule: CommSchedule, num_blocks: int) -> IntArray:
    """Message that brought each transfer's block to its sender; -1 where the sender owns it."""
    _, src, dst, block = transfer_arrays(schedule)
    message = np.repeat(np.arange(len(schedule.messages)), np.diff(schedule.messages.ptr))
    key, wanted = dst * num_blocks + block, src * num_blocks + block
    order = np.argsort(key)
    at = order[np.minimum(np.searchsorted(key[order], wanted), key.size - 1)]
    return np.where(key[at] == wanted, message[at], -1)


@njit(cache=True)
def _arrivals(
    src: IntArray, dst: IntArray, ptr: IntArray, feeder: IntArray, tier: IntArray, duration: IntArray, num_ranks: int
) -> IntArray:
    leaves, enters = np.zeros((2, num_ranks), dtype=np.int64), np.zeros((2, num_ranks), dtype=np.int64)
    end = np.zeros(src.size, dtype=np.int64)
    for i in range(src.size):
        begin = max(leaves[tier[i], src[i]], enters[tier[i], dst[i]])
        for k in range(ptr[i], ptr[i + 1]):
            if feeder[k] >= 0:
                begin = max(begin, end[feeder[k]])
        end[i] = begin + duration[i]
        leaves[tier[i], src[i]] = enters[tier[i], dst[i]] = end[i]
    return end


@njit(cache=True)
def _run_calls(ptr: IntArray, ready: IntArray, pairs: IntArray) -> tuple[IntArray, IntArray]:
    begin, end = np.zeros(ready.size, dtype=np.int64), np.zeros(ready.size, dtype=np.int64)
    for r in range(ptr.size - 1):
        now = 0
        for c in range(ptr[r], ptr[r + 1]):
            begin[c] = max(now, ready[c])
            now = end[c] = begin[c] + pairs[c]
    return begin, end


@njit(cache=True)
def _begun(ptr: IntArray, begin: IntArray, rank: IntArray, when: IntArray) -> IntArray:
    """Calls that ``rank`` has begun before ``when``."""
    out = np.zeros(rank.size, dtype=np.int64)
    for i in range(rank.size):
        mine = begin[ptr[rank[i]] : ptr[rank[i] + 1]]
        out[i] = np.searchsorted(mine, when[i])
    return out


@njit(cache=True)
def _play(
    src: IntArray, dst: IntArray, tier: IntArray, ready: IntArray, duration: IntArray, child_ptr: IntArray,
    child: IntArray, num_ranks: int,
) -> IntArray:  # fmt: skip
    """When each push starts: once it is ready and both links are free, first come, first served.

    What finds a link busy waits in that link's queue, so that nothing is looked at more often than links become free.
    """
    size = src.size
    left = child_ptr[1:] - child_ptr[:-1]
    parent_ptr, parent = _parents(child_ptr, child)
    ready = ready.copy()
    links = 4 * num_ranks  # of senders, then of receivers, by tier
    free_at = np.zeros(links, dtype=np.int64)
    first, last = np.full(links, -1, dtype=np.int64), np.full(links, -1, dtype=np.int64)
    behind = np.full(size, -1, dtype=np.int64)  # next in the same queue
    events = [(ready[0], 0)]  # pushes, and from ``size`` on links that become free
    events.pop()
    for i in range(size):
        if left[i] == 0:
            heapq.heappush(events, (ready[i], i))
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
                behind[i] = -1
                if first[queue] < 0:
                    first[queue] = i
                else:
                    behind[last[queue]] = i
                last[queue] = i
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
def _cut(
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
