"""Event simulation of a plan's forward pass: what it takes, and who waits for what.

Every rank has a full-duplex link per tier. A message starts when the sender's and the receiver's link of its tier are
free and the sender holds its blocks; rounds run in order on every link. A rank attends to its own tokens first, then to
stage after stage, each once its last message is in. Rim and area of every piece are priced as in :mod:`plan.cost`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, offsets
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.schedule import tier_of
from megatron_fcp.simulate.kernels import windowed_s


@dataclass(frozen=True)
class Price:
    """A priced forward pass; times in seconds.

    Attributes
    ----------
    makespan : float
        End of the slowest rank.
    ideal : float
        Every document as one kernel, perfectly spread over the ranks.
    compute, finish : FloatArray, shape [cp_size]
        Kernel time of a rank, and when it ends; the difference is waiting.
    stage_start, stage_time : tuple of FloatArray, one per rank, shape [num_stages]
        Stage 0 is local.
    message_start, message_end : FloatArray, shape [num_messages]
    bytes_received, bytes_sent : IntArray, shape [2, cp_size]
        By tier (0 inside a node); whole blocks, or what a window reaches of them.
    """

    makespan: float
    ideal: float
    compute: FloatArray
    finish: FloatArray
    stage_start: tuple[FloatArray, ...]
    stage_time: tuple[FloatArray, ...]
    message_start: FloatArray
    message_end: FloatArray
    bytes_received: IntArray
    bytes_sent: IntArray

    @property
    def efficiency(self) -> float:
        """Share of the makespan in which a perfect cluster would be done."""
        return self.ideal / self.makespan if self.makespan else 1.0

    @property
    def compute_bound(self) -> float:
        """Efficiency if nobody ever waited."""
        heaviest = float(self.compute.max())
        return self.ideal / heaviest if heaviest else 1.0

    @property
    def imbalance(self) -> float:
        """Heaviest rank's kernel time over the mean."""
        mean = float(self.compute.mean())
        return float(self.compute.max()) / mean if mean else 1.0


def ideal_time(table: BlockTable, cost: CostModel) -> float:
    """Seconds that all documents take as one causal kernel each, on one rank."""
    length = table.document_length.astype(np.float64)
    seen = length if table.window is None else np.minimum(length, table.window + 1)  # keys of a query, at most
    pairs = length * seen - seen * (seen - 1) / 2
    return float((pairs * (length + cost.q_half) / length * (seen + cost.kv_half) / seen).sum()) * cost.pair_s


def price_plan(plan: Plan, cost: CostModel, *, round_barriers: bool = False) -> Price:
    """Simulate the forward pass.

    Parameters
    ----------
    plan : Plan
        Causal. Its own ``ranks_per_node`` says which messages travel between nodes.
    cost : CostModel
    round_barriers : bool
        A rank starts round ``k + 1`` on either tier only once its round ``k`` is through on both.

    Raises
    ------
    ValueError
        If the plan's mask is not causal.
    """
    if plan.table.mask != "causal":
        raise ValueError(f"only causal plans can be priced, this one's mask is {plan.table.mask!r}")
    m, n = plan.schedule.messages, plan.cp_size
    tier = tier_of(m.src, m.dst, plan.ranks_per_node)
    counts = np.diff(m.ptr)
    size = counts * plan.table.block_size
    if plan.table.window is not None:  # only what the window reaches of a block travels
        shared = offsets((plan.table.shared_stop - plan.table.shared_start)[m.block])
        size = shared[m.ptr[1:]] - shared[m.ptr[:-1]]
    token_s = np.where(tier == 1, cost.token_s(1), cost.token_s(0))
    duration = (cost.latency_s + size * token_s).astype(np.float64)
    parent = _parents(plan)
    start, end = _transfer_times(
        m.src, m.dst, tier, m.ptr, parent, plan.schedule.message_round, duration, n, round_barriers
    )
    stage_ptr = offsets([ends.size + 1 for ends in plan.schedule.stage_ends])
    stage = _message_stage(plan)
    busy = stage_times(plan, stage, stage_ptr, cost)
    ready = np.zeros(busy.size)
    np.maximum.at(ready, stage_ptr[m.dst] + stage, end)
    begin, finish = _run_stages(stage_ptr, ready, busy)
    received, sent = np.zeros((2, n), dtype=np.int64), np.zeros((2, n), dtype=np.int64)
    np.add.at(received, (tier, m.dst), size * cost.kv_bytes)
    np.add.at(sent, (tier, m.src), size * cost.kv_bytes)
    split = stage_ptr[1:-1]
    return Price(
        makespan=float(finish.max()),
        ideal=ideal_time(plan.table, cost) / n,
        compute=np.add.reduceat(busy, stage_ptr[:-1]),
        finish=finish,
        stage_start=tuple(np.split(begin, split)),
        stage_time=tuple(np.split(busy, split)),
        message_start=start,
        message_end=end,
        bytes_received=received,
        bytes_sent=sent,
    )


def _message_stage(plan: Plan) -> IntArray:
    """Stage (from 1) in which the receiver of each message attends to it."""
    stage = np.zeros(len(plan.schedule.messages), dtype=np.int64)
    by_receiver = np.argsort(plan.schedule.messages.dst, kind="stable")
    pieces = np.searchsorted(plan.schedule.messages.dst[by_receiver], np.arange(plan.cp_size + 1))
    for rank, ends in enumerate(plan.schedule.stage_ends):
        mine = by_receiver[pieces[rank] : pieces[rank + 1]]
        stage[mine] = np.searchsorted(ends, plan.schedule.message_round[mine]) + 1
    return stage


def _parents(plan: Plan) -> IntArray:
    """Message that brought each transfer's block to its sender; -1 where the sender owns it. Shape [num_transfers]."""
    m = plan.schedule.messages
    message = np.repeat(np.arange(len(m)), np.diff(m.ptr))
    key = m.dst[message] * plan.table.num_blocks + m.block
    order = np.argsort(key, kind="stable")
    wanted = m.src[message] * plan.table.num_blocks + m.block
    parent = np.full(message.size, -1, dtype=np.int64)
    forwarded = np.flatnonzero(plan.placement.block_rank[m.block] != m.src[message])
    parent[forwarded] = message[order[np.searchsorted(key[order], wanted[forwarded])]]
    return parent


@njit(cache=True)
def _transfer_times(
    src: IntArray,
    dst: IntArray,
    tier: IntArray,
    ptr: IntArray,
    parent: IntArray,
    round_: IntArray,
    duration: FloatArray,
    num_ranks: int,
    round_barriers: bool,
) -> tuple[FloatArray, FloatArray]:
    send = np.zeros((2, num_ranks))
    recv = np.zeros((2, num_ranks))
    through = np.zeros(num_ranks)  # all of the rank's rounds before the current one
    pending = np.zeros(num_ranks)
    at = np.full(num_ranks, -1, dtype=np.int64)
    start = np.zeros(src.size)
    end = np.zeros(src.size)
    for i in range(src.size):
        s, d, t = src[i], dst[i], tier[i]
        begin = max(send[t, s], recv[t, d])
        for k in range(ptr[i], ptr[i + 1]):
            if parent[k] >= 0:
                begin = max(begin, end[parent[k]])
        if round_barriers:
            for r in (s, d):
                if at[r] != round_[i]:
                    at[r] = round_[i]
                    through[r] = max(through[r], pending[r])
                begin = max(begin, through[r])
        start[i] = begin
        end[i] = begin + duration[i]
        send[t, s] = end[i]
        recv[t, d] = end[i]
        pending[s] = max(pending[s], end[i])
        pending[d] = max(pending[d], end[i])
    return start, end


@njit(cache=True)
def _run_stages(stage_ptr: IntArray, ready: FloatArray, busy: FloatArray) -> tuple[FloatArray, FloatArray]:
    begin = np.zeros(busy.size)
    finish = np.zeros(stage_ptr.size - 1)
    for rank in range(stage_ptr.size - 1):
        now = 0.0
        for s in range(stage_ptr[rank], stage_ptr[rank + 1]):
            begin[s] = max(now, ready[s])
            now = begin[s] + busy[s]
        finish[rank] = now
    return begin, finish


def stage_times(plan: Plan, message_stage: IntArray, stage_ptr: IntArray, cost: CostModel) -> FloatArray:
    """Kernel seconds of every stage of every rank, flat by ``stage_ptr``."""
    if plan.table.window is not None:
        return windowed_s(plan, cost, backward=False)
    table, m = plan.table, plan.schedule.messages
    documents = max(table.document_length.size, 1)
    key = plan.placement.block_rank[table.fragment_block] * documents + table.fragment_document
    order = np.argsort(key, kind="stable")  # by rank and document, blocks ascending
    counts = np.diff(m.ptr)
    stage = np.repeat(stage_ptr[m.dst] + message_stage, counts)
    by_stage = np.argsort(stage, kind="stable")
    last_fragment = np.maximum(table.fragment_ptr[1:] - 1, 0)
    travelling = (
        table.fragment_document[last_fragment] if table.fragment_document.size else np.zeros(table.num_blocks, np.int64)
    )
    out = np.zeros(int(stage_ptr[-1]))
    _local_times(
        key[order] // documents,
        key[order] % documents,
        table.fragment_length[order],
        stage_ptr,
        cost.pair_s,
        cost.q_half,
        cost.kv_half,
        out,
    )
    _remote_times(
        key[order],
        table.fragment_block[order],
        offsets(table.fragment_length[order]),
        documents,
        np.repeat(m.dst, counts)[by_stage],
        stage[by_stage],
        m.block[by_stage],
        travelling,
        table.shared_stop - table.shared_start,
        cost.pair_s,
        cost.q_half,
        cost.kv_half,
        out,
    )
    return out


@njit(cache=True)
def _local_times(
    rank: IntArray,
    document: IntArray,
    length: IntArray,
    stage_ptr: IntArray,
    pair_s: float,
    qh: float,
    kh: float,
    out: FloatArray,
) -> None:
    i = 0
    while i < rank.size:
        n = 0.0
        j = i
        while j < rank.size and rank[j] == rank[i] and document[j] == document[i]:
            n += length[j]
            j += 1
        out[stage_ptr[rank[i]]] += n * (n + 1) / 2 * (n + qh) * (n + kh) / (n * n) * pair_s
        i = j


@njit(cache=True)
def _remote_times(
    key: IntArray,
    block: IntArray,
    prefix: IntArray,
    documents: int,
    dst: IntArray,
    stage: IntArray,
    arrived: IntArray,
    travelling: IntArray,
    shared: IntArray,
    pair_s: float,
    qh: float,
    kh: float,
    out: FloatArray,
) -> None:
    keys = np.zeros(documents)
    pairs = np.zeros(documents)
    queries = np.zeros(documents)
    touched = np.empty(documents, dtype=np.int64)
    i = 0
    while i < dst.size:
        num_touched = 0
        j = i
        while j < dst.size and stage[j] == stage[i]:
            b = arrived[j]
            d = travelling[b]
            if shared[b] > 0:
                wanted = dst[j] * documents + d
                high = np.searchsorted(key, wanted, side="right")
                low = np.searchsorted(key, wanted)
                after = low + np.searchsorted(block[low:high], b, side="right")
                q = float(prefix[high] - prefix[after])
                if q > 0:
                    if keys[d] == 0:
                        touched[num_touched] = d
                        num_touched += 1
                    keys[d] += shared[b]
                    pairs[d] += shared[b] * q
                    queries[d] = max(queries[d], q)
            j += 1
        total = 0.0
        for t in range(num_touched):
            d = touched[t]
            total += pairs[d] * (queries[d] + qh) * (keys[d] + kh) / (queries[d] * keys[d])
            keys[d] = 0.0
            pairs[d] = 0.0
            queries[d] = 0.0
        out[stage[i]] += total * pair_s
        i = j
