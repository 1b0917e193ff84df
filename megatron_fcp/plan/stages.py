"""Rounds for timed transfers, and each rank's rounds cut into compute stages.

A rank starts its next stage as soon as it is idle and enough has arrived; how much is enough is tried out per rank,
since few large stages keep kernels in shape and many small ones keep a rank with little local work busy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.delivery import grouped
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.shape import BlockShapes
from megatron_fcp.plan.swarm import Transfers
from megatron_fcp.plan.units import Sharing

# KV tokens that a rank's first remote stage waits for, and the factor by which later ones wait for more
ENOUGH = np.array(
    [[1.0, 1.0], [1024.0, 1.0], [1024.0, 2.0], [4096.0, 1.0], [4096.0, 2.0], [8192.0, 1.0], [16384.0, 1.0],
     [32768.0, 1.0], [1e18, 1.0]]
)  # fmt: skip


@njit(cache=True)
def message_ends(transfers: Transfers, duration: FloatArray, cp_size: int, in_step: bool) -> FloatArray:
    """When every message is in; ``in_step``: no rank starts a round before its last one is through on both tiers."""
    sent, received = np.zeros((2, cp_size)), np.zeros((2, cp_size))
    through, pending = np.zeros(cp_size), np.zeros(cp_size)
    at = np.full(cp_size, -1, dtype=np.int64)
    end = np.zeros(transfers.src.size)
    for m in range(end.size):
        s, d, t = transfers.src[m], transfers.dst[m], transfers.tier[m]
        begin = max(sent[t, s], received[t, d])
        for i in range(transfers.message_ptr[m], transfers.message_ptr[m + 1]):
            if transfers.parent[i] >= 0:
                begin = max(begin, end[transfers.parent[i]])
        if in_step:
            for r in (s, d):
                if at[r] != transfers.round[m]:
                    at[r] = transfers.round[m]
                    through[r] = max(through[r], pending[r])
                begin = max(begin, through[r])
        end[m] = begin + duration[m]
        sent[t, s] = received[t, d] = end[m]
        pending[s], pending[d] = max(pending[s], end[m]), max(pending[d], end[m])
    return end


def cut_by_arrival(
    sharing: Sharing,
    shapes: BlockShapes,
    owner: IntArray,
    transfers: Transfers,
    end: FloatArray,
    local_s: FloatArray,
    pair_s: FloatArray,
    q_half: float,
    kv_half: float,
    keys: IntArray,
    wave_ends: IntArray,
) -> tuple[IntArray, IntArray, FloatArray]:
    """Stage ends of all ranks, flat, their offsets (shape [cp_size + 1]) and when every rank ends.

    Parameters
    ----------
    end : FloatArray, shape [num_messages]
        When every message is in.
    local_s, pair_s : FloatArray, shape [cp_size]
        Seconds of every rank's local stage, and of a pair on it.
    keys : IntArray, shape [num_units]
        KV tokens of every unit.
    wave_ends : IntArray, shape [num_waves]
        Rounds at which every stage ends that holds anything up to there.
    """
    order, ptr = grouped(transfers.dst, local_s.size)
    loads = _loads(sharing, shapes, owner, transfers, keys, order)
    round_ = transfers.round[order]
    return _cut(
        ptr, round_, np.searchsorted(wave_ends, round_), end[order], loads, local_s, pair_s, q_half, kv_half,
        sharing.share_rank.size,
    )  # fmt: skip


class Loads(NamedTuple):
    """What messages bring; a message is for one share. All of shape [num_messages], in the order asked for.

    Attributes
    ----------
    share : IntArray
    keys, pairs, queries : FloatArray
        KV tokens, query-key pairs that they are for, and query tokens behind the first of them.
    """

    share: IntArray
    keys: FloatArray
    pairs: FloatArray
    queries: FloatArray


@njit(cache=True)
def _loads(
    sharing: Sharing, shapes: BlockShapes, owner: IntArray, transfers: Transfers, keys: IntArray, order: IntArray
) -> Loads:
    num_shares = sharing.share_rank.size
    after = np.full(num_shares, -1, dtype=np.int64)
    of_rank = np.full(sharing.rank_ptr.size, -1, dtype=np.int64)
    total = np.zeros(num_shares)
    for d in range(sharing.share_ptr.size - 1):
        low, high = sharing.share_ptr[d], sharing.share_ptr[d + 1]
        if low == high:
            continue
        for e in range(low, high):
            of_rank[sharing.share_rank[e]] = e
        first = sharing.unit_first[sharing.unit_ptr[d]]
        last_unit = sharing.unit_ptr[d + 1] - 1
        last = sharing.unit_first[last_unit] + sharing.unit_count[last_unit]
        for b in range(first, last + 1):
            e = of_rank[owner[b]]
            total[e] += shapes.head_length[b] if shapes.head[b] == d else shapes.tail_length[b]
            if after[e] < 0:
                after[e] = b
    table = np.full(num_shares, -1, dtype=np.int64)  # of queries by unit, for shares that hold early blocks
    size = 0
    for m in range(order.size):
        latest = transfers.message_ptr[m + 1] - 1
        e = transfers.share[latest]
        if table[e] < 0 and sharing.unit_first[transfers.unit[latest]] > after[e]:
            table[e] = size
            d = sharing.share_document[e]
            size += sharing.unit_ptr[d + 1] - sharing.unit_ptr[d]
    behind = np.empty(size)
    for e in range(num_shares):
        if table[e] >= 0:
            _count_behind(e, sharing, shapes, owner, behind[table[e] :])
    share = np.empty(order.size, dtype=np.int64)
    tokens, pairs, queries = np.zeros(order.size), np.zeros(order.size), np.zeros(order.size)
    for i in range(order.size):
        low, high = transfers.message_ptr[order[i]], transfers.message_ptr[order[i] + 1]
        e = share[i] = transfers.share[low]
        base = table[e] - sharing.unit_ptr[sharing.share_document[e]]
        for k in range(low, high):
            u = transfers.unit[k]
            seen = total[e] if table[e] < 0 else behind[base + u]
            tokens[i] += keys[u]
            pairs[i] += keys[u] * seen
            queries[i] = max(queries[i], seen)
    return Loads(share, tokens, pairs, queries)


@njit(cache=True)
def _count_behind(e: int, sharing: Sharing, shapes: BlockShapes, owner: IntArray, out: FloatArray) -> None:
    """Tokens of share ``e`` behind every unit of its document."""
    d, r = sharing.share_document[e], sharing.share_rank[e]
    u = sharing.unit_ptr[d + 1] - 1
    block = sharing.unit_first[u] + sharing.unit_count[u]
    tokens = 0.0
    while u >= sharing.unit_ptr[d]:
        while block >= sharing.unit_first[u] + sharing.unit_count[u]:
            if owner[block] == r:
                tokens += shapes.head_length[block] if shapes.head[block] == d else shapes.tail_length[block]
            block -= 1
        out[u - sharing.unit_ptr[d]] = tokens
        u -= 1


@njit(cache=True)
def _cut(
    ptr: IntArray,
    round_: IntArray,
    wave: IntArray,
    end: FloatArray,
    loads: Loads,
    local_s: FloatArray,
    pair_s: FloatArray,
    qh: float,
    kh: float,
    num_shares: int,
) -> tuple[IntArray, IntArray, FloatArray]:
    cp_size = local_s.size
    ends = np.empty(round_.size, dtype=np.int64)
    ends_ptr = np.zeros(cp_size + 1, dtype=np.int64)
    trials = ENOUGH.shape[0]
    finish, busy = np.empty((cp_size, trials)), np.empty((cp_size, trials))
    scratch = np.empty(round_.size + 1, dtype=np.int64)
    sums = np.zeros((3, num_shares))
    makespan = 0.0
    for r in range(cp_size):
        for k in range(trials):
            finish[r, k], busy[r, k], _ = _run(
                ptr[r], ptr[r + 1], round_, wave, end, loads, local_s[r], pair_s[r], qh, kh, ENOUGH[k, 0],
                ENOUGH[k, 1], sums, scratch,
            )  # fmt: skip
        makespan = max(makespan, finish[r].min())
    n = 0
    chosen = np.empty(cp_size)
    for r in range(cp_size):
        best = -1
        for k in range(trials):  # the least work that does not end after everybody else
            if finish[r, k] <= makespan and (best < 0 or busy[r, k] < busy[r, best]):
                best = k
        chosen[r] = finish[r, best]
        _, _, stages = _run(
            ptr[r], ptr[r + 1], round_, wave, end, loads, local_s[r], pair_s[r], qh, kh, ENOUGH[best, 0],
            ENOUGH[best, 1], sums, ends[n:],
        )  # fmt: skip
        n += stages
        ends_ptr[r + 1] = n
    return ends[:n], ends_ptr, chosen


@njit(cache=True)
def _run(
    low: int,
    high: int,
    round_: IntArray,
    wave: IntArray,
    end: FloatArray,
    loads: Loads,
    now: float,
    pair_s: float,
    qh: float,
    kh: float,
    enough: float,
    growth: float,
    sums: FloatArray,
    ends: IntArray,
) -> tuple[float, float, int]:
    """When a rank ends that waits for ``enough`` KV tokens per stage, its kernel time, its stages (into ``ends``)."""
    share, keys, pairs, queries = loads
    stages = 0
    busy = now
    i = low
    while i < high:
        j = i
        tokens = 0.0
        ready = now
        while j < high and wave[j] == wave[i]:
            k, through, added = j, 0.0, 0.0  # a stage takes whole rounds
            while k < high and round_[k] == round_[j]:
                through = max(through, end[k])
                added += keys[k]
                k += 1
            if through > ready and tokens >= enough:
                break
            ready = max(ready, through)
            tokens += added
            j = k
        price = 0.0
        for k in range(i, j):
            e = share[k]
            sums[0, e] += keys[k]
            sums[1, e] += pairs[k]
            sums[2, e] = max(sums[2, e], queries[k])
        for k in range(i, j):
            e = share[k]
            if sums[1, e] > 0:
                price += sums[1, e] * (1 + qh / sums[2, e]) * (1 + kh / sums[0, e])
            sums[0, e] = sums[1, e] = sums[2, e] = 0.0
        now = ready + price * pair_s
        busy += price * pair_s
        ends[stages] = round_[j - 1]
        stages += 1
        i = j
        enough *= growth
    return now, busy, stages
