"""What the ``reshuffle`` layout adds to a pass: tokens move to FCP's owners at its head and home at its tail.

Home is Megatron's own sharding: the stream in ``2 * cp_size`` chunks, of which rank ``i`` has chunks ``i`` and ``2 *
cp_size - 1 - i``. Forward brings K and V, then Q, and takes the output home; backward brings the output's gradient and
takes dQ, dK and dV home (Q, K and V were kept)::

    exposed      |-- K V Q in --|==== attention ====|-- out home --|
    overlapped   |KV|-- Q in parts --|     what no later stage touches goes home at once
                      |== local, part by part ==|== stage 1 ==|== stage 2 ==|-- the rest --|
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.calls import message_stages
from megatron_fcp.plan.coloring import color_edges
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.plan import Plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.program import COMPUTE, MESSAGE, Builder, Program

PARTS = 8  # of a rank's blocks, brought and attended to one after the other


def with_reshuffle(
    program: Program, plan: Plan, case: Case, *, overlap: bool = True, backward: bool = False
) -> Program:
    """``program``, which is ``plan`` lowered, with the way in and the way home around it.

    ``overlap`` takes the faster of the two: where the layout's traffic fills the links, overlapping it only delays KV.
    """
    exposed = _Wrapped(program, plan, case, False, backward).build()
    if not overlap:
        return exposed
    return min((exposed, _Wrapped(program, plan, case, True, backward).build()), key=lambda p: p.run().makespan)


def home_ranks(plan: Plan) -> tuple[IntArray, IntArray, IntArray]:
    """(block, home rank, tokens) of each piece of a block that lies in one of Megatron's chunks."""
    size, n = plan.table.block_size, plan.cp_size
    chunk = -(-plan.tokens_per_rank // 2)
    edges = np.unique(np.append(np.arange(0, plan.table.num_tokens + 1, size), np.arange(chunk, chunk * 2 * n, chunk)))
    edges = edges[edges <= plan.table.num_tokens]
    start = edges[:-1]
    place = np.minimum(start // chunk, 2 * n - 1)
    return start // size, np.minimum(place, 2 * n - 1 - place), np.diff(edges)


class _Moves(NamedTuple):
    ops: IntArray
    dst: IntArray
    turn: IntArray
    piece: IntArray


class _Wrapped:
    def __init__(self, program: Program, plan: Plan, case: Case, overlap: bool, backward: bool) -> None:
        self.program, self.plan, self.case, self.overlap = program, plan, case, overlap
        self.out = Builder(plan.cp_size, plan.ranks_per_node)
        self.block, self.home, self.tokens = home_ranks(plan)
        self.owner = plan.placement.block_rank[self.block]
        q = case.shape.num_heads * case.shape.head_dim * case.shape.bytes_per_element
        kv = case.forward.kv_bytes
        self.kv_in, self.q_in, self.back = (0, q, q + kv) if backward else (kv, q, q)

    def build(self) -> Program:
        n, p = self.plan.cp_size, self.program
        kv_ready = np.full(n, -1)
        if self.kv_in:
            kv = self._move(self.home, self.owner, self.kv_in)
            kv_ready = self._joined(kv.ops, kv.dst)
        q = self._move(self.home, self.owner, self.q_in)
        parts = PARTS if self.overlap else 1
        q_part = q.turn * parts // max(int(q.turn.max(initial=0)) + 1, 1)
        local = np.flatnonzero((p.kind == COMPUTE) & (p.stage == 0))
        local = local[np.unique(p.src[local], return_index=True)[1]]  # a rank's first; backward may have several
        share = np.zeros(n)
        share[p.src[local]] = p.seconds[local] / parts
        gate = np.full(n, -1)
        for i in range(parts):
            mine = q_part == i
            gate = np.maximum(gate, self._joined(q.ops[mine], q.dst[mine]))
            if i < parts - 1:
                ops = self.out.compute(np.arange(n), share, stage=0)
                self.out.depend(ops, gate)
                self.out.depend(ops, kv_ready)
        shift = self._body(local, share)
        self.out.depend(local + shift, gate[p.src[local]])
        self.out.depend(local + shift, kv_ready[p.src[local]])
        moves = np.flatnonzero(p.kind == MESSAGE)
        self.out.depend(moves + shift, (kv_ready if self.overlap else gate)[p.src[moves]])
        self._home(shift)
        return self.out.build()

    def _body(self, local: IntArray, share: np.ndarray) -> int:
        """Copy the program in, its local stage cut to one part; returns by how much its numbers moved."""
        p = self.program
        seconds = p.seconds.copy()
        seconds[local] = share[p.src[local]]
        ops = self.out.add(p.kind, p.src, p.dst, seconds, tier=p.tier, size=p.size, stage=p.stage, round=p.round)
        shift = int(ops[0])
        self.out.depend(np.repeat(ops, np.diff(p.dep_ptr)), p.dep + shift)
        return shift

    def _home(self, shift: int) -> None:
        """Take results home: after the rank's last stage that touches them if overlapped, else after its last."""
        p, n = self.program, self.plan.cp_size
        calls = np.flatnonzero(p.kind == COMPUTE)
        width = int(p.stage[calls].max(initial=0)) + 1
        call_of = np.full((n, width), -1, dtype=np.int64)
        call_of[p.src[calls], p.stage[calls]] = calls
        call_of = np.maximum.accumulate(call_of, axis=1)  # the latest of all stages up to each
        final = self._final_stage()[self.block] if self.overlap else np.full(self.block.size, width - 1)
        call = call_of[self.owner, np.minimum(final, width - 1)]
        ready = self.out.build().run().end[call + shift] if self.overlap else None  # nothing so far waits for these
        moves = self._move(self.owner, self.home, self.back, ready)
        self.out.depend(moves.ops, call[moves.piece] + shift)

    def _move(self, src: IntArray, dst: IntArray, token_bytes: int, ready: FloatArray | None = None) -> _Moves:
        """One message per piece in congestion-free rounds; ``ready`` says when each may leave."""
        cost, n = self.case.forward, self.plan.cp_size
        away = np.flatnonzero(src != dst)
        tier = self.out.tier(src[away], dst[away])
        seconds = cost.latency_s + self.tokens[away] * token_bytes * (
            np.where(tier == 1, 1 / cost.inter_bytes_per_s, 1 / cost.intra_bytes_per_s)
        )
        if ready is None:
            turn = color_edges(src[away], dst[away], n)
        else:
            turn = _greedy_rounds(src[away], dst[away], (ready[away] / max(seconds.mean(), 1e-12)).astype(np.int64), n)
        order = np.lexsort((src[away], turn))
        away, turn, seconds = away[order], turn[order], seconds[order]
        ops = self.out.message(src[away], dst[away], seconds, self.tokens[away] * token_bytes, round=turn)
        return _Moves(ops, dst[away], turn, away)

    def _joined(self, ops: IntArray, receiver: IntArray) -> IntArray:
        """For each rank an operation that waits for all of ``ops`` that it receives; -1 where there are none."""
        out = np.full(self.plan.cp_size, -1)
        for rank in np.unique(receiver):
            out[rank] = self.out.join(ops[receiver == rank])[0]
        return out

    def _final_stage(self) -> IntArray:
        """Last stage in which any query of each block attends to something, shape [num_blocks]."""
        table, m = self.plan.table, self.plan.schedule.messages
        documents = max(table.document_length.size, 1)
        stage = np.repeat(message_stages(self.plan.schedule), np.diff(m.ptr))
        receiver = np.repeat(m.dst, np.diff(m.ptr))
        tail = table.fragment_document[np.maximum(table.fragment_ptr[1:] - 1, 0)] if documents else m.block
        latest = np.zeros(self.plan.cp_size * documents, dtype=np.int64)
        if m.block.size:
            np.maximum.at(latest, receiver * documents + tail[m.block], stage)
        owner = self.plan.placement.block_rank[table.fragment_block]
        final = np.zeros(table.num_blocks, dtype=np.int64)
        np.maximum.at(final, table.fragment_block, latest[owner * documents + table.fragment_document])
        return final


@njit(cache=True)
def _greedy_rounds(src: IntArray, dst: IntArray, ready: IntArray, num_ranks: int) -> IntArray:
    """Rounds without two sends or receives of one rank; no piece before its ``ready`` round, busiest ends first."""
    degree = np.zeros(2 * num_ranks, dtype=np.int64)
    for i in range(src.size):
        degree[src[i]] += 1
        degree[num_ranks + dst[i]] += 1
    weight = np.empty(src.size, dtype=np.int64)
    for i in range(src.size):
        weight[i] = -max(degree[src[i]], degree[num_ranks + dst[i]])
    order = np.argsort(weight, kind="mergesort")
    used = np.full(2 * num_ranks, -1, dtype=np.int64)
    turn = np.full(src.size, -1, dtype=np.int64)
    left = src.size
    now = 0
    while left > 0:
        for i in order:
            if turn[i] < 0 and ready[i] <= now and used[src[i]] < now and used[num_ranks + dst[i]] < now:
                turn[i] = now
                used[src[i]] = now
                used[num_ranks + dst[i]] = now
                left -= 1
        now += 1
    return turn
