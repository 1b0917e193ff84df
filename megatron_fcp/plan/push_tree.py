"""Push rounds for plans in which blocks are passed on: trees of their own, in the order of a rough clock.

A block's partials could climb the tree in which it was pulled, but that is deep (a block passes from rank to rank as
links become free) and its messages mix blocks that are attended to at different times. All receivers hold a partial, so
any tree over them will do::

    owner <- leaders of two other nodes <- leaders of four more <- ...     between nodes, log-many hops
    leader <- the other receivers of its node                              inside a node

Every push is played through on a clock: calls end after the pairs that their rank attends to up to then, a push starts
once what it carries is computed and collected and both links are free, first come, first served. The order that
results is cut into rounds (:mod:`plan.push_clock`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import BoolArray, IntArray, Scalar, frozen
from megatron_fcp.plan.backward import PushSchedule, transfer_arrays
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.calls import Calls
from megatron_fcp.plan.cost import PushPrices
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.push_clock import begun, call_times, cut_rounds, per_token, play
from megatron_fcp.plan.schedule import CommSchedule, tier_of
from megatron_fcp.plan.transfers import Messages

CHUNK_TOKENS = 1024  # at least, of a document per rank of a node, between which trees change
CHUNK_MESSAGES = 4  # so much longer than it costs by itself should a chunk travel
RUN_BLOCKS = 4  # consecutive blocks with the same leader in a node
GRACE = 4  # share of the pass that others may be busier than who cannot wait, and still collect for them


def push_by_tree(
    table: BlockTable,
    placement: Placement,
    schedule: CommSchedule,
    calls: Calls,
    ranks_per_node: int,
    prices: PushPrices,
) -> PushSchedule:
    """Push rounds for ``schedule``, all of them behind its pulls."""
    _, _, dst, block = transfer_arrays(schedule)
    begin, end, _, free_at = call_times(table, schedule, calls, ranks_per_node, prices)
    hurried = np.zeros(placement.cp_size, dtype=np.bool_)
    p = climb(table, placement, (dst, block, calls.of_transfer), end, hurried, ranks_per_node, prices)
    when = play(p.src, p.dst, p.tier, end[p.call], p.duration, p.child_ptr, p.child, p.depth, free_at)
    order = np.argsort(when, kind="stable")
    round_ = cut_rounds(p.src, p.dst, p.tier, order, p.child_ptr, p.child, placement.cp_size)
    in_rounds = np.lexsort((p.dst, p.src, round_))
    num_rounds = int(round_.max()) + 1
    return PushSchedule(
        num_rounds,
        Messages(frozen(p.src), frozen(p.dst), frozen(p.ptr), frozen(p.block)).take(in_rounds),
        frozen(round_[in_rounds]),
        frozen(np.full(num_rounds, schedule.num_rounds - 1)),
        frozen(begun(calls.ptr, begin, p.src, when)[in_rounds]),
        frozen(begun(calls.ptr, begin, p.dst, when)[in_rounds]),
    )


class Climb(NamedTuple):
    """Messages that bring partials home.

    Attributes
    ----------
    src, dst, tier, duration, call, depth : IntArray, shape [num_messages]
        ``call``: of the sender, in which it computes its own part of what it sends; ``depth``: hops to the owner.
    ptr, block : IntArray, shapes [num_messages + 1], [num_transfers]
    child_ptr, child : IntArray, shapes [num_messages + 1], [num_children]
        Messages that must have come before.
    """

    src: IntArray
    dst: IntArray
    tier: IntArray
    duration: IntArray
    call: IntArray
    depth: IntArray
    ptr: IntArray
    block: IntArray
    child_ptr: IntArray
    child: IntArray


def climb(
    table: BlockTable,
    placement: Placement,
    arrivals: tuple[IntArray, IntArray, IntArray],
    end: IntArray,
    hurried: BoolArray,
    ranks_per_node: int,
    prices: PushPrices,
) -> Climb:
    """Messages up one tree per block, over all that hold a partial of it.

    Parameters
    ----------
    table, placement
    arrivals : three IntArrays of shape [num_partials]
        Rank, block and call of each partial.
    end : IntArray, shape [num_calls]
        When each call ends.
    hurried : BoolArray, shape [cp_size]
        Ranks that should not wait for others: they collect where those that may are busier by far.
    ranks_per_node : int
    prices : PushPrices
    """
    rank, block, call = arrivals
    order = np.lexsort((rank, block))
    rank, block, call = rank[order], block[order], call[order]
    chunk_tokens = max(CHUNK_TOKENS, CHUNK_MESSAGES * prices.message // prices.token)
    chunk_blocks = max(chunk_tokens * ranks_per_node // table.block_size, 1)
    length = table.shared_stop - table.shared_start
    price = per_token(prices)
    busy = hurried * (end.max(initial=0) // GRACE)
    up, depth = _trees(rank, block, end[call], placement.block_rank, length, busy, chunk_blocks, ranks_per_node, price)
    chunk = block // chunk_blocks
    by = np.lexsort((block, chunk, -depth, call, up, rank))
    rank, block, call, up, depth, chunk = (a[by] for a in (rank, block, call, up, depth, chunk))
    new = np.ones(rank.size, dtype=bool)  # where what leaves a rank together begins
    new[1:] = np.any([np.diff(key) != 0 for key in (rank, up, call, depth, chunk)], axis=0)
    start = np.flatnonzero(new)
    child_ptr, child = _children(rank, up, block, np.cumsum(new) - 1, table.num_blocks)
    tier = tier_of(rank[start], up[start], ranks_per_node)
    duration = prices.message + np.add.reduceat(length[block], start) * price[tier]
    ptr = np.append(start, rank.size)
    return Climb(rank[start], up[start], tier, duration, call[start], depth[start], ptr, block, child_ptr, child)


@njit(cache=True)
def _trees(
    rank: IntArray,
    block: IntArray,
    when: IntArray,
    owner: IntArray,
    tokens: IntArray,
    busy: IntArray,
    chunk_blocks: int,
    ranks_per_node: int,
    price: IntArray,
) -> tuple[IntArray, IntArray]:
    """Where each receiver's partial goes, and over how many hops it gets home; sorted by block, then rank.

    Near the owner is a node that computes its partials late, for what would wait for them then has few hops to go, and
    whose leader is not busy: ``busy``, shape [cp_size], is how long each rank's links collect, and kept up. The order
    of nodes is the same for all blocks of a chunk, the leader of a node for all of a run.
    """
    up, depth = np.empty_like(rank), np.empty_like(rank)
    num_nodes = (busy.size - 1) // ranks_per_node + 1
    run, former = np.full(num_nodes, -1, dtype=np.int64), np.full(num_nodes, -1, dtype=np.int64)
    chunk, place = np.full(num_nodes, -1, dtype=np.int64), np.zeros(num_nodes, dtype=np.int64)
    first, stop, leader, places = np.empty((4, num_nodes), dtype=np.int64)
    i = 0
    while i < rank.size:
        root, length = owner[block[i]], tokens[block[i]]
        nodes = 0
        j = i
        while j < rank.size and block[j] == block[i]:
            k, node = j, rank[j] // ranks_per_node
            while k < rank.size and block[k] == block[i] and rank[k] // ranks_per_node == node:
                k += 1
            if node == root // ranks_per_node:
                up[j:k], depth[j:k] = root, 1
            else:
                if run[node] != block[i] // RUN_BLOCKS:
                    run[node], former[node] = block[i] // RUN_BLOCKS, -1
                chosen = j + _leader(rank[j:k], busy, former[node])
                former[node] = rank[chosen]
                if chunk[node] != block[i] // chunk_blocks:
                    chunk[node], place[node] = block[i] // chunk_blocks, busy[rank[chosen]] - when[j:k].max()
                busy[rank[chosen]] += (k - j - 1) * length * price[0]
                first[nodes], stop[nodes], leader[nodes], places[nodes] = j, k, chosen, place[node]
                nodes += 1
            j = k
        order = np.argsort(places[:nodes], kind="mergesort")
        _attach(order, first, stop, leader, rank, root, up, depth)
        for node in range(nodes):
            busy[up[leader[node]]] += length * price[1]
        i = j
    return up, depth


@njit(cache=True)
def _leader(rank: IntArray, busy: IntArray, former: Scalar) -> Scalar:
    """Index of the one who collects: ``former`` if it is here, else the least busy."""
    best = 0
    for i in range(rank.size):
        if rank[i] == former:
            return i
        if busy[rank[i]] < busy[rank[best]]:
            best = i
    return best


@njit(cache=True)
def _attach(
    order: IntArray, first: IntArray, stop: IntArray, leader: IntArray, rank: IntArray, root: Scalar, up: IntArray,
    depth: IntArray,
) -> None:  # fmt: skip
    """Hang the leaders of the nodes in ``order`` into a binary tree below ``root``, and all others below theirs."""
    for number in range(1, order.size + 1):
        node, above = order[number - 1], (number - 1) // 2
        hops, at = 1, above
        while at:
            at = (at - 1) // 2
            hops += 1
        lead = leader[node]
        up[first[node] : stop[node]], depth[first[node] : stop[node]] = rank[lead], hops + 1
        up[lead], depth[lead] = rank[leader[order[above - 1]]] if above else root, hops


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
